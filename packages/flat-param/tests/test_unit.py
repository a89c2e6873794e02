"""One unit's forward, backward and gradients on two ranks, beside one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

WORKERS = Path(__file__).parent / "workers"
pytestmark = [pytest.mark.dist, pytest.mark.slow]

CLAIMS = {
    "unit_options": (
        "bad_calls_are_refused_before_anything_changes",
        "part_of_a_unit_is_refused_by_name",
        "class_and_names_stay",
        "offload_policy_changes_nothing_on_the_cpu",
        "first_rank_can_speak_for_all",
        "init_fn_that_changes_a_parameter_is_refused_by_name",
        "meta_init_equals_plain_init",
        "meta_init_without_reset_is_refused",
        "ranks_come_from_a_mesh_or_a_group",
    ),
    "unit_values": (
        "plain_state_loads_and_mismatches_are_named",
        "loaded_values_replace_what_was_reassigned",
        "reassigned_parameter_is_taken_up",
        "reassigned_parameter_is_what_everything_reads",
        "whole_params_can_be_read_and_written",
        "whole_weights_are_never_older_than_the_last_step",
    ),
    "unit_passes": (
        "a_backward_inside_one_through_the_same_units_is_refused",
        "a_loss_of_an_input_alone_sends_nothing",
        "activation_checkpointing_inside_and_around_units",
        "gradients_add_up_until_they_are_cleared",
        "input_used_in_many_steps_is_hooked_once",
        "layer_unused_on_one_rank_gets_the_mean_with_zero",
        "no_sync_accumulates_and_stays_silent",
        "one_forward_two_backwards",
        "two_forwards_one_backward",
        "units_nest_three_deep",
    ),
    "unit_memory": (
        "leaves_are_made_once",
        "memory_of_whole_parameters_is_given_back",
        "module_is_freed_at_once",
        "peak_of_whole_gradients_is_as_planned",
        "peak_of_whole_parameters_is_as_planned",
    ),
    "unit_dtypes": (
        "dtype_change_is_followed",
        "mixed_precision_computes_low_and_keeps_high",
        "odd_parameters_survive",
        "reduce_dtype_and_inputs_are_as_asked",
    ),
    "unit_frozen": (
        "frozen_layers_pass_gradients_through",
        "frozen_segments_have_no_gradient_memory_or_traffic",
        "frozen_weights_stay_until_the_last_input_has_its_gradient",
    ),
    "unit_ties": (
        "parameters_that_share_memory_are_refused_by_name",
        "tied_weights_across_units_are_refused_by_name",
        "tied_weights_in_one_unit_train",
        "weights_tied_to_a_flattened_module_beside_are_refused_by_name",
        "weights_tied_to_a_unit_beside_are_refused_by_name",
    ),
    "unit_optimizers": (
        "clipping_knows_all_ranks",
        "optimizer_made_before_still_trains",
        "rank_without_gradients_joins_the_norm",
        "torch_clipping_is_right_on_shards",
        "whole_tensor_optimizers_match_one_process_or_refuse",
    ),
    "unit_fsdp2": (
        "accumulated_sums_are_divided_once",
        "factors_that_are_none_are_refused",
        "list_is_gathered_once",
        "lists_of_modules_are_units",
        "outputs_are_cast_as_fsdp2_casts_them",
        "outputs_are_cast_in_methods_and_after_hooks",
        "sums_are_divided_as_fsdp2_divides_them",
    ),
    "unit_ignored": (
        "a_loss_of_an_ignored_one_alone_sends_nothing",
        "checkpoints_have_them",
        "clipping_is_the_same_on_all_ranks",
        "gradients_are_one_processes",
        "nothing_is_done_to_them",
        "one_set_does_for_all_units",
        "ties_to_ignored_ones_are_refused_by_name",
        "training_is_fsdp2s",
        "wrong_ones_are_refused_by_name",
    ),
    "unit_by_hand": (
        "another_order_is_an_error",
        "forwards_may_gather_and_free_others",
        "freed_units_are_gathered_again",
        "freed_units_are_gathered_in_their_turn",
        "steps_in_between_are_not_lost",
        "steps_where_a_rank_has_no_piece_are_seen",
        "units_are_gathered_once",
        "use_beside_forward_has_its_gradients",
        "writes_that_a_backward_misses_are_an_error",
        "assigned_values_stay",
        "writes_in_place_are_lost",
    ),
    "unit_by_hand_uses": (
        "everything_else_sees_pieces",
        "units_around_take_up_what_is_there",
    ),
    "unit_prefetch": (
        "lists_change_when_and_not_what_is_gathered",
        "lists_of_any_order_are_right",
        "lists_that_differ_between_ranks_are_an_error",
        "units_listed_and_not_used_are_freed",
        "wrong_lists_are_refused_by_name",
    ),
    "unit_reductions": (
        "comm_hook_of_uneven_parts_and_units",
        "copies_are_summed_when_it_is_said",
        "copies_of_one_unit_are_left_apart",
        "hook_changes_sums_as_fsdp2s",
        "hooks_that_are_none_are_refused",
        "kept_sums_are_dropped",
        "kept_sums_of_a_layer_that_is_left_out_are_summed",
        "no_shard_is_copies_alone",
        "torchs_comm_hooks_reduce_as_with_fsdp1",
        "values_of_a_step_are_never_stale",
        "whole_parameters_stay_after_backward_as_fsdp2s",
    ),
    "unit_scaler": (
        "every_rank_that_shares_a_step_is_asked",
        "it_is_on_one_rank_alone",
        "overflow_on_one_rank_is_one_on_all",
        "plain_modules_are_asked_alone",
        "training_is_fsdp2s_and_fsdp1s",
    ),
    "unit_switches": (
        "freeing_is_switched_off_and_on",
        "methods_run_with_whole_parameters",
        "methods_that_are_none_are_refused",
        "one_module_of_a_class_is_not_another",
        "sums_are_switched_off_and_on",
    ),
    "unit_failures": (
        "failed_backward_leaves_the_module_usable",
        "failed_forward_leaves_the_module_usable",
        "mistake_of_all_ranks_can_be_mended",
    ),
}
CLAIM_BY_CLAIM = [
    pytest.param(script, claim, id=claim) for script, claims in CLAIMS.items() for claim in claims
]


@pytest.mark.parametrize(("script", "claim"), CLAIM_BY_CLAIM)
def test_claim_holds_on_every_rank(
    ranks: Callable[..., list[Any]], script: str, claim: str
) -> None:
    """Each `check_<claim>` of workers/unit_*.py passes on both ranks."""
    for rank, result in enumerate(ranks(2, script)):
        assert not result[claim], f"rank {rank}: {result[claim]}"


def test_every_check_is_listed(ranks: Callable[..., list[Any]]) -> None:
    """No check of these workers is forgotten here, and no worker."""
    assert sorted(CLAIMS) == sorted(path.stem for path in WORKERS.glob("unit_*.py"))
    for script, claims in CLAIMS.items():
        assert sorted(ranks(2, script)[0]) == sorted(claims)
