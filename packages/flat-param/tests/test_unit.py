"""One unit's forward, backward and gradients on two ranks, beside one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.dist, pytest.mark.slow]

CLAIMS = (
    "activation_checkpointing_inside_and_around_units",
    "bad_calls_are_refused_before_anything_changes",
    "class_and_names_stay",
    "clipping_knows_all_ranks",
    "cpu_offload_changes_nothing_on_the_cpu",
    "dtype_change_is_followed",
    "failed_backward_leaves_the_module_usable",
    "failed_forward_leaves_the_module_usable",
    "first_rank_can_speak_for_all",
    "frozen_layers_pass_gradients_through",
    "frozen_segments_have_no_gradient_memory_or_traffic",
    "frozen_weights_stay_until_the_last_input_has_its_gradient",
    "gradients_add_up_until_they_are_cleared",
    "init_fn_that_changes_a_parameter_is_refused_by_name",
    "input_used_in_many_steps_is_hooked_once",
    "layer_unused_on_one_rank_gets_the_mean_with_zero",
    "leaves_are_made_once",
    "low_precision_grads_are_kept_on_request",
    "mistake_of_all_ranks_can_be_mended",
    "memory_of_whole_parameters_is_given_back",
    "meta_init_equals_plain_init",
    "meta_init_without_reset_is_refused",
    "mixed_precision_computes_low_and_keeps_high",
    "module_is_collected",
    "no_sync_accumulates_and_stays_silent",
    "odd_parameters_survive",
    "one_forward_two_backwards",
    "optimizer_made_before_still_trains",
    "parameters_that_share_memory_are_refused_by_name",
    "peak_of_whole_parameters_is_as_planned",
    "plain_state_loads_and_mismatches_are_named",
    "ranks_come_from_a_mesh_or_a_group",
    "reassigned_parameter_is_taken_up",
    "reduce_dtype_and_inputs_are_as_asked",
    "tied_weights_across_units_are_refused_by_name",
    "tied_weights_in_one_unit_train",
    "torch_clipping_is_right_on_shards",
    "two_forwards_one_backward",
    "weights_tied_to_a_flattened_module_beside_are_refused_by_name",
    "weights_tied_to_a_unit_beside_are_refused_by_name",
    "units_nest_three_deep",
    "whole_params_can_be_read_and_written",
    "whole_tensor_optimizers_match_one_process_or_refuse",
    "whole_weights_are_never_older_than_the_last_step",
)


@pytest.mark.parametrize("claim", CLAIMS)
def test_claim_holds_on_every_rank(ranks: Callable[..., list[Any]], claim: str) -> None:
    """Each `check_<claim>` of workers/behaviour.py passes on both ranks."""
    for rank, result in enumerate(ranks(2, "behaviour")):
        assert not result[claim], f"rank {rank}: {result[claim]}"


def test_every_check_is_listed(ranks: Callable[..., list[Any]]) -> None:
    """No check of the worker is forgotten here."""
    assert sorted(ranks(2, "behaviour")[0]) == sorted(CLAIMS)
