"""Sharded training is plain training: losses, parameters, gradients, traffic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

WORLDS = pytest.mark.parametrize("world", [1, 2, 3, pytest.param(4, marks=pytest.mark.nightly)])

pytestmark = [pytest.mark.dist, pytest.mark.slow]


@WORLDS
def test_training_follows_one_process(ranks: Callable[..., list[Any]], world: int) -> None:
    """Up to rounding, for each way and boundary; parameters that no rank used have no gradient."""
    for result in ranks(world, "trajectories"):
        for case, found in result.items():
            assert found["loss_error"] < 1e-6, case
            assert found["param_error"] < 1e-6, case
            assert all(found["unused"]), case


@WORLDS
def test_units_are_gathered_and_reduced_once_a_pass(
    ranks: Callable[..., list[Any]], world: int
) -> None:
    """Calls of three steps of four units, and bytes of the shards; one rank sends nothing."""
    for result in ranks(world, "trajectories"):
        for case, found in result.items():
            gathers = {"replicated": 0, "ZeRO-2": 4}.get(case, 4 + 3)
            reduces = 0 if case == "replicated" else 4
            calls = found["calls"]
            assert calls.get("all_gather", 0) == 3 * gathers * (world > 1), case
            assert calls.get("reduce_scatter", 0) == 3 * reduces * (world > 1), case
            assert found["bytes"] == found["planned_bytes"], case
