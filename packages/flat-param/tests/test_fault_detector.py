"""A rank that dies in the middle of a step is named by the others, in time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from flat_param.comm._fault_detector import FaultDetector
from flat_param.comm._trail import Wait

TIMEOUT_S = 30
KILLS = ((2, 1), (3, 0), (4, 2))


class Gone:
    """A store whose host died."""

    def set(self, key: str, value: str) -> None:
        """Nobody takes the note."""
        raise RuntimeError("connection reset")

    def check(self, keys: list[str]) -> bool:
        """Nobody answers."""
        raise RuntimeError("connection reset")


def _wait(rank: int, label: str) -> Wait:
    """A wait for what the other of two ranks has not started."""
    return Wait(rank, label, f"group {rank}", (0, 1), 1, {f"group {rank}": 1})


@pytest.fixture(scope="module")
def kills(ranks: Any, run: Callable[..., Any]) -> dict[Any, Any]:
    """One for each case, all at the same time, since survivors wait for seconds."""
    found = {
        (world, victim): run(world, "killed_step", (victim, "ZeRO-3"), TIMEOUT_S, (victim,))
        for world, victim in KILLS
    }
    ranks.ahead(list(found.values()))
    return found


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize(("world", "victim"), KILLS)
def test_rank_killed_in_a_step_is_named_by_all_others(
    ranks: Any, kills: dict[Any, Any], world: int, victim: int
) -> None:
    """A SIGKILL inside backward: every survivor fails within the timeout and names the rank."""
    results = ranks.results_of(kills[world, victim])
    for rank, result in enumerate(results):
        if rank != victim:
            assert f"rank {victim} did not complete the collective" in result["error"]
            assert result["seconds"] < TIMEOUT_S


def test_silent_rank_is_named(notes: Any) -> None:
    """Who answers the alarm is there; who does not is named."""
    board = FaultDetector(notes, (0, 1, 2), rank=0)
    assert not board.trouble()
    notes.set("flat_param/fault/2", "here")
    assert board.diagnosis("connection closed") == "rank 1"
    assert board.trouble() == "rank 0: connection closed"


def test_a_reason_keeps_the_rank_it_came_from(notes: Any) -> None:
    """A rank that passes another's words on does not put its own name before them."""
    notes.set("flat_param/fault/1", "here")
    FaultDetector(notes, (0, 1), rank=0).diagnosis("rank 1: no")
    assert FaultDetector(notes, (0, 1), rank=1).trouble() == "rank 1: no"


def test_nobody_silent_is_said(notes: Any) -> None:
    """An error without a dead rank accuses nobody."""
    notes.set("flat_param/fault/1", "here")
    assert (
        FaultDetector(notes, (0, 1), rank=0).diagnosis("wrong size") == "no rank is gone, but one"
    )


def test_rank_that_goes_on_waits_for_nobody(notes: Any) -> None:
    """Two that wait for each other are named, until one of them has what it waited for."""
    first, second = (FaultDetector(notes, (0, 1), rank=rank) for rank in (0, 1))
    assert first.deadlock(_wait(0, "all_gather of 'a'")) == ""
    assert second.deadlock(_wait(1, "all_gather of 'b'")) == (
        "rank 0 waits in all_gather of 'a', rank 1 waits in all_gather of 'b'"
    )
    first.stop_waiting()
    assert second.deadlock(_wait(1, "all_gather of 'b'")) == ""


def test_store_gone_points_to_its_host() -> None:
    """The store lives in rank 0; without it, rank 0 is the suspect."""
    board = FaultDetector(Gone(), (0, 1), rank=1)
    assert board.trouble() == "the store is gone"
    assert not board.deadlock(_wait(1, "all_gather"))
    board.stop_waiting()
    board.refuse("no")
    assert board.diagnosis("closed").startswith("rank 0")


def test_no_store_names_the_group() -> None:
    """Where torch gives no access to the store, the group is all that can be named."""
    board = FaultDetector(None, (0, 1, 2), rank=1)
    assert not board.trouble()
    assert not board.share_change("moved")
    assert not board.deadlock(_wait(1, "all_gather"))
    board.stop_waiting()
    board.refuse("no")
    assert board.diagnosis("closed") == "one of ranks 0, 2"
