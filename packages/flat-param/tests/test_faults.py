"""Ranks that die are named by all others, in time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.dist, pytest.mark.slow]

TIMEOUT_S = 30
KILLS = ((2, 1), (3, 0), (4, 2))
ABSENCES = ("first call", "later call", "ended")
NIGHTLY = ((4, 2), "later call", "ended")


def _cases(*cases: Any) -> list[Any]:
    marks = {case: [pytest.mark.nightly] if case in NIGHTLY else [] for case in cases}
    return [pytest.param(case, marks=marks[case], id=str(case)) for case in cases]


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, ranks: Any, run: Callable[..., Any]) -> dict[Any, Any]:
    """All that are selected, at the same time, since survivors wait for seconds."""
    known = {
        **{
            (world, victim): run(world, "killed_step", (victim, "ZeRO-3"), TIMEOUT_S, (victim,))
            for world, victim in KILLS
        },
        **{how: run(2, "absent_rank", (how,)) for how in ABSENCES},
    }
    here = [item.callspec.params for item in request.session.items if item.path == request.path]
    selected = [case for params in here for case in params.values()]
    found = {case: each for case, each in known.items() if case in selected}
    ranks.ahead(list(found.values()))
    return found


@pytest.mark.parametrize("kill", _cases(*KILLS))
def test_rank_killed_in_a_step_is_named_by_all_others(
    ranks: Any, runs: dict[Any, Any], kill: tuple[int, int]
) -> None:
    """A SIGKILL inside backward: every survivor fails within the timeout and names the rank."""
    _, victim = kill
    for rank, result in enumerate(ranks.results_of(runs[kill])):
        if rank != victim:
            assert f"rank {victim} did not complete the collective" in result["error"]
            assert result["seconds"] < TIMEOUT_S


@pytest.mark.parametrize("how", _cases(*ABSENCES))
def test_checkpoint_call_on_one_rank_ends_with_the_timeout(
    ranks: Any, runs: dict[Any, Any], how: str
) -> None:
    """The group of checkpoints has the timeout of the default group, here 4 s."""
    first, _ = ranks.results_of(runs[how])
    assert "not all of ranks 0, 1 have called it within the timeout" in first["error"]
    assert first["seconds"] < 20
