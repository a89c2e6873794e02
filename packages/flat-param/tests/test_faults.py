"""Ranks that die are named by all others, in time."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = [pytest.mark.dist, pytest.mark.slow]

TIMEOUT_S = 30
KILLS = ((2, 1), (3, 0), (4, 2))


@pytest.fixture(scope="module")
def survivors(ranks: Any) -> dict[tuple[int, int], list[Any]]:
    """Results by kill; all runs go on at the same time, since survivors wait for seconds."""
    options = {"timeout_s": TIMEOUT_S}
    calls = [
        (world, (victim, "ZeRO-3"), {**options, "killed": (victim,)}) for world, victim in KILLS
    ]
    return dict(zip(KILLS, ranks.at_once("killed_step", calls), strict=True))


@pytest.mark.parametrize("kill", KILLS)
def test_rank_killed_in_a_step_is_named_by_all_others(
    survivors: dict[tuple[int, int], list[Any]], kill: tuple[int, int]
) -> None:
    """A SIGKILL inside backward: every survivor fails within the timeout and names the rank."""
    world, victim = kill
    results = survivors[kill]
    assert [rank for rank in range(world) if results[rank] is None] == [victim]
    for result in filter(None, results):
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
    first, _ = ranks(2, "absent_rank", how, killed=(1,) if how == "ended" else ())
    assert "not all of ranks 0, 1 have called it within the timeout" in first["error"]
    assert first["seconds"] < 20
