"""Orders of collectives are compared, and waits that never end are found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from flat_param.comm._trail import Trail, Wait, deadlock, first_difference, in_vain
from flat_param.sharded._order import _agreed, _word

TIMEOUT_S = 60


def wait(rank: int, key: str, number: int, **started: int) -> Wait:
    """A wait of one of two ranks."""
    return Wait(rank, f"{key} {number}", key, (0, 1), number, started)


def trail(*marks: str) -> Trail:
    """What a rank has started."""
    made = Trail((0, 1), "0-1/0")
    for mark in marks:
        made.add(mark, mark.encode())
    return made


def test_order_changes_the_word() -> None:
    """The same collectives in another order are told apart, also by the largest bytes."""
    first, other = _word([trail("a", "b")]), _word([trail("b", "a")])
    assert _agreed(first)
    assert _agreed(other)
    assert not _agreed(bytes(map(max, first, other)))
    assert first == _word([trail("a", "b")])


def test_comparing_begins_anew() -> None:
    """Only what came since the last comparison counts; numbers go on."""
    made = trail("a")
    made.compared()
    assert made.checksum == 0
    assert made.add("b", b"b") == 2
    assert list(made.recent) == ["b"]


def test_difference_names_the_end_of_a_shorter_list() -> None:
    """A rank that has done less is named so."""
    assert (
        first_difference([(0, ["a", "b"]), (1, ["a"])])
        == "rank 0 did b where rank 1 did nothing more"
    )
    assert first_difference([(0, ["a"]), (1, ["a"])]) == ""


def test_ranks_that_wait_for_each_other_wait_in_vain() -> None:
    """Each has not started what the other waits for."""
    waits = {0: wait(0, "g", 5, g=5, r=0), 1: wait(1, "r", 1, g=4, r=1)}
    assert in_vain(waits) == waits


@pytest.mark.parametrize(
    "other",
    [
        wait(1, "g", 5, g=5, r=0),  # both wait for the same: the network is slow
        wait(1, "r", 1, g=5, r=1),  # it has started what rank 0 waits for
        wait(1, "g", 4, g=4, r=0),  # what it waits for is under way on rank 0
    ],
)
def test_slow_ranks_do_not_wait_in_vain(other: Wait) -> None:
    """Nothing is said of ranks that will go on."""
    assert in_vain({0: wait(0, "g", 5, g=5, r=0), 1: other}) == {}


def test_a_rank_that_computes_is_waited_for() -> None:
    """A rank without a note may still come."""
    assert in_vain({0: wait(0, "g", 5, g=5)}) == {}


def test_notes_are_read_and_taken_back(notes: Any) -> None:
    """Both are named while both wait; nobody when one goes on."""
    mine = wait(0, "g", 5, g=5, r=0)
    wait(1, "r", 1, g=4, r=1).post(notes)
    assert deadlock(notes, mine) == "rank 0 waits in g 5, rank 1 waits in r 1"
    Wait.over(notes, 1)
    assert deadlock(notes, mine) == ""


@pytest.mark.dist
@pytest.mark.slow
def test_unit_left_out_is_named_in_seconds(ranks: Callable[..., list[Any]]) -> None:
    """Each rank is told what both wait for, long before the timeout."""
    for result in ranks(2, "left_out", timeout_s=TIMEOUT_S):
        assert "rank 0 waits in all_gather of unit 'blocks.0'" in result["error"]
        assert "rank 1 waits in reduce_scatter of the outermost unit" in result["error"]
        assert result["seconds"] < TIMEOUT_S / 4
