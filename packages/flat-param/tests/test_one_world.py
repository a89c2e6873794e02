"""Checkpoints of modules that are cut over both axes of a mesh, on two and four ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

import flat_param
from flat_param.checkpoint._one_world import one_world

from ._claims import all_are_listed, holds_on_every_rank

CLAIMS = (
    "any_cut_loads_into_any_other",
    "checkpoint_is_cut_anew_offline",
    "each_element_is_written_once",
    "error_on_one_rank_is_one_on_all",
    "resumed_training_is_the_same",
    "state_by_block_is_refused",
    "torch_reads_what_is_saved",
    "what_torch_saves_is_loaded",
)
MESHES = ((1, 2), (2, 2), (1, 4))


@pytest.fixture(scope="module", params=MESHES, ids=str)
def results(
    request: pytest.FixtureRequest,
    ranks: Callable[..., list[Any]],
    tmp_path_factory: pytest.TempPathFactory,
) -> list[dict[str, str]]:
    """All checks of workers/parallel_checkpoints.py, run once per mesh."""
    rows, columns = request.param
    folder = str(tmp_path_factory.mktemp("parallel"))
    return ranks(rows * columns, "parallel_checkpoints", folder, rows, timeout_s=180)


test_claim_holds_on_every_rank = holds_on_every_rank(CLAIMS)
test_every_check_is_listed = all_are_listed(CLAIMS)


BESIDE_CLAIMS = (
    "error_puts_back",
    "first_ranks_values_are_given_to_all",
    "loaded_over_another_mesh",
    "norm_is_that_of_whole_gradients",
    "saved_and_loaded",
    "whole_states_are_loaded",
)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("rows_of", [(2, 1), (2, 2), (4, 2)], ids=str)
def test_dtensors_beside_units_are_saved_and_loaded(
    ranks: Callable[..., list[Any]],
    tmp_path_factory: pytest.TempPathFactory,
    rows_of: tuple[int, int],
) -> None:
    """Each check of workers/beside_units.py passes on all ranks, in rows that share units."""
    world, rows = rows_of
    folder = str(tmp_path_factory.mktemp("beside"))
    for rank, result in enumerate(ranks(world, "beside_units", folder, rows)):
        assert sorted(result) == list(BESIDE_CLAIMS)
        failed = [f"rank {rank}: {claim}\n{error}" for claim, error in result.items() if error]
        assert not failed, "\n".join(failed)


def test_module_that_is_not_sharded_is_refused() -> None:
    """By the function that was called."""
    with pytest.raises(flat_param.StateError) as raised:
        one_world(nn.Linear(2, 2), function="load_sharded")
    assert str(raised.value) == (
        "flat_param.load_sharded: Linear is not sharded, but a part of it is requested. Call "
        "fully_shard first."
    )
