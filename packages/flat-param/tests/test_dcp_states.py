"""torch's state dict and checkpoint functions work on sharded models as on FSDP2's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ._claims import all_are_listed, holds_on_every_rank

CLAIMS = (
    "async_save_beside_training",
    "checkpoints_of_fsdp2_and_of_plain_models",
    "computing_with_a_shard_is_refused",
    "count_of_ranks_that_skip_does_not_count",
    "flattened_state_with_groups_in_other_order",
    "full_state_is_plain",
    "full_state_is_taken",
    "load_in_place_needs_no_set",
    "offline_conversion",
    "saved_state_comes_back_and_trains_on",
    "state_dict_is_refused_inside_forward",
    "state_of_other_rank_is_refused",
    "state_of_own_rank_comes_back",
    "training_is_that_of_one_process",
    "whole_tensors_load",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where the two ranks save, and others load."""
    return str(tmp_path_factory.mktemp("states"))


@pytest.fixture(scope="module")
def results(ranks: Callable[..., list[Any]], folder: str) -> list[dict[str, str]]:
    """All checks of workers/dcp_states.py, run once on two ranks."""
    return ranks(2, "dcp_states", folder, timeout_s=120)


test_claim_holds_on_every_rank = holds_on_every_rank(CLAIMS)
test_every_check_is_listed = all_are_listed(CLAIMS)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 3, 4])
def test_checkpoint_loads_on_other_number_of_ranks(
    ranks: Callable[..., list[Any]], results: list[dict[str, str]], folder: str, world: int
) -> None:
    """All checks of workers/dcp_resume.py."""
    for found in ranks(world, "dcp_resume", folder, timeout_s=120):
        assert not any(found.values()), "\n".join(found.values())
