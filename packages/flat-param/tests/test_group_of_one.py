"""What holds on two ranks holds in a group of one, which communicates nothing."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

import flat_param

WORKERS = Path(__file__).parent / "workers"
CLAIMS = {
    "behaviour": (
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
        "frozen_weights_stay_until_the_last_input_has_its_gradient",
        "gradients_add_up_until_they_are_cleared",
        "init_fn_that_changes_a_parameter_is_refused_by_name",
        "input_used_in_many_steps_is_hooked_once",
        "layer_unused_on_one_rank_gets_the_mean_with_zero",
        "leaves_are_made_once",
        "low_precision_grads_are_kept_on_request",
        "memory_of_whole_parameters_is_given_back",
        "meta_init_equals_plain_init",
        "meta_init_without_reset_is_refused",
        "mistake_of_all_ranks_can_be_mended",
        "mixed_precision_computes_low_and_keeps_high",
        "module_is_collected",
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
        "units_nest_three_deep",
        "weights_tied_to_a_flattened_module_beside_are_refused_by_name",
        "weights_tied_to_a_unit_beside_are_refused_by_name",
        "whole_params_can_be_read_and_written",
        "whole_weights_are_never_older_than_the_last_step",
    ),
    "hooks": (
        "an_optimizer_in_backward_trains_as_after_it",
        "hooks_are_told_once_of_each_sum",
        "torchs_total_norm_is_of_all_ranks",
    ),
}
QUICK_CLAIMS_OF_FILES = {
    "checkpoints": (
        "adafactor_state_is_kept",
        "damaged_files_are_refused_by_name",
        "full_state_equals_the_plain_one",
        "hostile_files_are_errors_not_executions",
        "mismatched_checkpoints_are_refused_by_name",
        "sharded_save_makes_no_collective",
        "torch_loads_our_checkpoint",
    ),
    "damage": (
        "checksum_tells_every_change_of_place",
        "claimed_sizes_are_checked_first",
        "data_of_another_checkpoint_is_refused",
        "every_flipped_bit_is_refused",
        "mutated_metadata_is_refused_cleanly",
        "pickles_cannot_change_classes",
        "plain_files_are_all_or_nothing",
        "rectangles_that_overlap_are_refused",
        "resharding_writes_checksums",
    ),
    "loads": (
        "extra_state_comes_back",
        "training_goes_on_as_if_nothing_had_been",
    ),
    "save_protocol": (
        "copies_take_part",
        "error_before_writing_is_an_error_on_all",
        "ranks_meet_without_a_store",
    ),
    "two_ranks": (
        "one_layout_is_loaded_into_another",
        "resharding_offline_changes_nothing",
    ),
}


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], ModuleType]]:
    """Give a script of tests/workers as a module, in a process that is the only rank."""
    before, imported = set(sys.modules), list(sys.path)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    sys.path.insert(0, str(WORKERS))

    def load(name: str) -> ModuleType:
        module = importlib.import_module(name)
        if hasattr(module, "FOLDER"):
            module.FOLDER = tmp_path_factory.mktemp(name)
        if hasattr(module, "GROUPS"):
            module.GROUPS[:] = [dist.group.WORLD] * 2
        if name == "two_ranks":
            module.checkpoints.FOLDER = tmp_path_factory.mktemp(name)
        return module

    yield load
    sys.path[:] = imported
    for name in set(sys.modules) - before:
        if WORKERS in Path(getattr(sys.modules[name], "__file__", None) or "/").parents:
            del sys.modules[name]
    dist.destroy_process_group()


OF_ITS_OWN_DTYPE = {
    "peak_of_whole_parameters_is_as_planned",
    "ranks_come_from_a_mesh_or_a_group",
    "whole_weights_are_never_older_than_the_last_step",
}
"""Claims that compare bits, bytes or outputs with the plain module's."""


def _listed(claims: dict[str, tuple[str, ...]]) -> list[tuple[str, str]]:
    return [(script, claim) for script, names in claims.items() for claim in names]


@pytest.mark.parametrize(("script", "claim"), _listed(CLAIMS | QUICK_CLAIMS_OF_FILES))
def test_claim_holds(worker: Callable[[str], ModuleType], script: str, claim: str) -> None:
    """`check_<claim>` of a worker passes here."""
    getattr(worker(script), f"check_{claim}")(0, 1)


@pytest.mark.parametrize(
    ("script", "claim"), [each for each in _listed(CLAIMS) if each[1] not in OF_ITS_OWN_DTYPE]
)
def test_claim_holds_where_whole_parameters_are_made(
    worker: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    script: str,
    claim: str,
) -> None:
    """The same where the model computes in float64: its shards are gathered, and freed again."""
    module = worker(script)
    precise = flat_param.MixedPrecision(param_dtype=torch.float64)

    def sharded(*args: Any, **options: Any) -> torch.nn.Module:
        return real(*args, **{"mixed_precision": precise, **options})

    real = module.sharded
    monkeypatch.setattr(module, "sharded", sharded)
    getattr(module, f"check_{claim}")(0, 1)


def test_gradients_have_one_memory_for_all_steps(worker: Callable[[str], ModuleType]) -> None:
    """What is cleared is filled again where it was, so that a step allocates nothing for it."""
    module = worker("behaviour")
    (ids,) = module.batches(1, 1)
    model = module.sharded()
    module.loss_of(model, ids).backward()
    first = model.head.weight.grad
    model.zero_grad()
    module.loss_of(model, ids).backward()
    assert model.head.weight.grad.data_ptr() == first.data_ptr()
