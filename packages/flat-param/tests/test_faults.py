"""A rank that dies in the middle of a step is named by the others, in time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from flat_param._faults import FaultBoard

TIMEOUT_S = 30


class Notes(dict[str, str]):
    """A store in one process."""

    def set(self, key: str, value: str) -> None:
        """Write a note."""
        self[key] = value

    def check(self, keys: list[str]) -> bool:
        """Whether all notes are there."""
        return all(key in self for key in keys)


class Gone:
    """A store whose host died."""

    def set(self, key: str, value: str) -> None:
        """Nobody takes the note."""
        raise RuntimeError("connection reset")

    def check(self, keys: list[str]) -> bool:
        """Nobody answers."""
        raise RuntimeError("connection reset")


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize(("world", "victim"), [(2, 1), (3, 0), (4, 2)])
def test_rank_killed_in_a_step_is_named_by_all_others(
    ranks: Callable[..., list[Any]], world: int, victim: int
) -> None:
    """A SIGKILL inside backward: every survivor fails within the timeout and names the rank."""
    results = ranks(
        world, "killed_step", victim, "FULL_SHARD", timeout_s=TIMEOUT_S, killed=(victim,)
    )
    for rank, result in enumerate(results):
        if rank != victim:
            assert f"rank {victim} did not complete the collective" in result["error"]
            assert result["seconds"] < TIMEOUT_S


def test_silent_rank_is_named() -> None:
    """Who answers the alarm is there; who does not is named."""
    notes = Notes()
    board = FaultBoard(notes, (0, 1, 2), rank=0)
    assert not board.is_raised()
    notes.set("flat_param/fault/2", "here")
    assert board.verdict("connection closed") == "rank 1"
    assert board.is_raised()


def test_nobody_silent_is_said() -> None:
    """An error without a dead rank accuses nobody."""
    notes = Notes({"flat_param/fault/1": "here"})
    assert FaultBoard(notes, (0, 1), rank=0).verdict("wrong size") == "no rank is gone, but one"


def test_store_gone_points_to_its_host() -> None:
    """The store lives in rank 0; without it, rank 0 is the suspect."""
    board = FaultBoard(Gone(), (0, 1), rank=1)
    assert board.is_raised()
    assert board.verdict("closed").startswith("rank 0")


def test_no_store_names_the_group() -> None:
    """Where torch hands out no store, the group is all that can be named."""
    board = FaultBoard(None, (0, 1, 2), rank=1)
    assert not board.is_raised()
    assert board.verdict("closed") == "one of ranks 0, 2"
