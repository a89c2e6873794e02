"""Ranks that die, that go another way, or that change alone are named by all others, in time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.dist, pytest.mark.slow]

TIMEOUT_S = 30
KILLS = ((2, 1), (3, 0), (4, 2))
CHANGES = ((2, "shape", "ZeRO-3"), (2, "to", "ZeRO-3"), (2, "to", "replicated"), (4, "to", "HSDP"))


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


@pytest.fixture(scope="module")
def changes(ranks: Any, run: Callable[..., Any]) -> dict[Any, Any]:
    """One for each case, all at the same time."""
    found = {each: run(each[0], "one_sided", each[1:], TIMEOUT_S) for each in CHANGES}
    ranks.ahead(list(found.values()))
    return found


@pytest.mark.nightly
@pytest.mark.parametrize("case", CHANGES, ids=str)
def test_one_sided_change_is_an_error_on_every_rank(
    ranks: Any, changes: dict[Any, Any], case: tuple[int, str, str]
) -> None:
    """All fail within the timeout, each with the words of the rank that changed."""
    moved = "parameters are torch.float64 on cpu"
    words = moved if case[1] == "to" else "'head.bias' was re-assigned with shape (3,)"
    results = ranks.results_of(changes[case])
    for result in results:
        assert words in result["error"]
        assert result["seconds"] < TIMEOUT_S / 2
    assert all(result["error"].startswith("CommError") for result in results[:-1])
    kind = f"CommError: flat_param.fully_shard: {moved}" if case[1] == "to" else "ParameterError"
    assert results[-1]["error"].startswith(kind)
