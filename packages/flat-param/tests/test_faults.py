"""Ranks that die are named by all others, in time."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = [pytest.mark.dist, pytest.mark.slow]

TIMEOUT_S = 30
LIMIT_S = 60
KILLS = ((2, 1), (3, 0), (4, 2))
ABSENCES = ("first call", "later call", "ended")
NIGHTLY = ((4, 2), "later call", "ended")


def _cases(*cases: Any) -> list[Any]:
    marks = {case: [pytest.mark.nightly] if case in NIGHTLY else [] for case in cases}
    return [pytest.param(case, marks=marks[case], id=str(case)) for case in cases]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, ranks: Any) -> dict[Any, list[Any]]:
    """By case, those of all that are selected; they run together, since survivors wait."""
    kills = {
        (world, victim): ("killed_step", world, (victim, "ZeRO-3"), TIMEOUT_S, (victim,))
        for world, victim in KILLS
    }
    absences = {
        how: ("absent_rank", 2, (how,), LIMIT_S, (1,) if how == "ended" else ()) for how in ABSENCES
    }
    here = [item.callspec.params for item in request.session.items if item.path == request.path]
    selected = [case for params in here for case in params.values()]
    cases = {case: run for case, run in {**kills, **absences}.items() if case in selected}
    calls = [
        (script, world, args, {"timeout_s": limit, "killed": killed})
        for script, world, args, limit, killed in cases.values()
    ]
    return dict(zip(cases, ranks.at_once(calls), strict=True))


@pytest.mark.parametrize("kill", _cases(*KILLS))
def test_rank_killed_in_a_step_is_named_by_all_others(
    results: dict[Any, list[Any]], kill: tuple[int, int]
) -> None:
    """A SIGKILL inside backward: every survivor fails within the timeout and names the rank."""
    world, victim = kill
    found = results[kill]
    assert [rank for rank in range(world) if found[rank] is None] == [victim]
    for result in filter(None, found):
        assert f"rank {victim} did not complete the collective" in result["error"]
        assert result["seconds"] < TIMEOUT_S


@pytest.mark.parametrize("how", _cases(*ABSENCES))
def test_checkpoint_call_on_one_rank_ends_with_the_timeout(
    results: dict[Any, list[Any]], how: str
) -> None:
    """The group of checkpoints has the timeout of the default group, here 4 s."""
    first, _ = results[how]
    assert "not all of ranks 0, 1 have called it within the timeout" in first["error"]
    assert first["seconds"] < 20
