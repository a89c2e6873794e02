"""Sharded training is plain training: losses, parameters, gradients, traffic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

WORLDS = (1, 2, 3, 4)
CASES = ("replicated", "ZeRO-2", "ZeRO-3")
BOUNDARY_CASES = ("ZeRO-3 row", "ZeRO-3 tensor")

pytestmark = [pytest.mark.dist, pytest.mark.slow]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("world", WORLDS)
def test_training_any_strategy_follows_one_process(
    ranks: Callable[..., list[Any]], world: int, case: str
) -> None:
    """Losses and parameters equal those of one process up to rounding, padding included."""
    for result in ranks(world, "trajectories"):
        assert result[case]["loss_error"] < 1e-6
        assert result[case]["param_error"] < 1e-6


@pytest.mark.parametrize("case", BOUNDARY_CASES)
@pytest.mark.parametrize("world", WORLDS[1:])
def test_training_on_rows_or_tensors_follows_one_process(
    ranks: Callable[..., list[Any]], world: int, case: str
) -> None:
    """Uneven shards train as one process does."""
    for result in ranks(world, "trajectories"):
        assert result[case]["loss_error"] < 1e-6
        assert result[case]["param_error"] < 1e-6


def test_training_hybrid_follows_one_process(ranks: Callable[..., list[Any]]) -> None:
    """Two copies of two shards train as one process does."""
    for result in ranks(4, "trajectories"):
        assert result["HSDP"]["loss_error"] < 1e-6
        assert result["HSDP"]["param_error"] < 1e-6


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("world", WORLDS)
def test_grad_of_unused_parameter_is_none_on_every_rank(
    ranks: Callable[..., list[Any]], world: int, case: str
) -> None:
    """Only parameters that some rank used have a gradient, and they have it everywhere."""
    for result in ranks(world, "trajectories"):
        assert all(result[case]["unused_grads"])
        assert all(result[case]["used_grads"])


@pytest.mark.parametrize("case", CASES)
def test_one_rank_communicates_nothing_as_planned(
    ranks: Callable[..., list[Any]], case: str
) -> None:
    """In a world of one the plan is no collective, and its shards are the parameters."""
    (result,) = ranks(1, "trajectories")
    assert result[case]["counts"] == result[case]["planned"] == {}
    assert result[case]["bytes"] == result[case]["planned_bytes"]


@pytest.mark.parametrize("case", CASES + BOUNDARY_CASES)
@pytest.mark.parametrize("world", WORLDS[1:])
def test_collectives_are_as_planned(ranks: Callable[..., list[Any]], world: int, case: str) -> None:
    """Calls and bytes of three steps, and bytes of the shards, are what the planner says."""
    for result in ranks(world, "trajectories"):
        found = dict(result[case]["counts"])
        calls, sent = found["all_reduce"]
        clips = clip_calls(case)
        found["all_reduce"] = [calls - clips, sent - clips * clip_bytes(world)]
        found = {kind: count for kind, count in found.items() if count[0]}
        assert found == result[case]["planned"]
        assert result[case]["bytes"] == result[case]["planned_bytes"]


def clip_calls(case: str) -> int:
    """Each step's clipping sums one float over ranks, unless every rank has it all."""
    return 0 if case == "replicated" else 3


def clip_bytes(world: int) -> int:
    """Of one float32."""
    return 2 * (world - 1) * 4 // world


@pytest.mark.parametrize(("world", "stride"), [(1, 5), (2, 7)])
def test_fully_shard_stopped_anywhere_can_be_called_again_or_says_what_to_do(
    ranks: Callable[..., list[Any]], world: int, stride: int
) -> None:
    """Meta parameters are on meta again; once the first one is cut, the package refuses it."""
    for result in ranks(world, "interrupted", "sharding", stride, timeout_s=60):
        assert result["places"] > 100
        assert result["refused"] > 0
        assert result["wrong"] == []
