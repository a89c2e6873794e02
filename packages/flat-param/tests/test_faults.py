"""Ranks that die are named by all others, in time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.dist, pytest.mark.slow]

TIMEOUT_S = 30
KILLS = ((2, 1), (3, 0), (4, 2))


@pytest.fixture(scope="module")
def runs(ranks: Any, run: Callable[..., Any]) -> dict[Any, Any]:
    """All at the same time, since survivors wait for seconds."""
    found = {
        (world, victim): run(world, "killed_step", (victim, "ZeRO-3"), TIMEOUT_S, (victim,))
        for world, victim in KILLS
    }
    ranks.ahead(list(found.values()))
    return found


@pytest.mark.parametrize(("world", "victim"), KILLS)
def test_rank_killed_in_a_step_is_named_by_all_others(
    ranks: Any, runs: dict[Any, Any], world: int, victim: int
) -> None:
    """A SIGKILL inside backward: every survivor fails within the timeout and names the rank."""
    results = ranks.results_of(runs[world, victim])
    for rank, result in enumerate(results):
        if rank != victim:
            assert f"rank {victim} did not complete the collective" in result["error"]
            assert result["seconds"] < TIMEOUT_S


@pytest.mark.parametrize(
    "how",
    [
        "first call",
        *(pytest.param(each, marks=pytest.mark.nightly) for each in ("later call", "ended")),
    ],
)
def test_checkpoint_call_on_one_rank_ends_with_the_timeout(ranks: Any, how: str) -> None:
    """The group of checkpoints has the timeout of the default group, here 4 s."""
    first, _ = ranks(2, "absent_rank", how)
    assert "not all of ranks 0, 1 have called it within the timeout" in first["error"]
    assert first["seconds"] < 20
