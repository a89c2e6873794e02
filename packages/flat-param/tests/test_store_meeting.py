"""The ranks of a save meet in a store: here they are threads of one process."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

from flat_param import CommError
from flat_param.checkpoint import _store_meeting
from flat_param.checkpoint._store_meeting import Notes, StoreMeeting

TIMEOUT_S = 10.0
LATER: dict[str, Any] = {"step": 2}
EARLIER: dict[str, Any] = {"step": 1}


def _by_step(notes: Notes) -> set[int]:
    return {rank for rank, note in enumerate(notes) if note["step"] < 2}


def _words(reports: Notes) -> str:
    return " ".join(report.get("error") or report["word"] for report in reports)


def _save(
    meeting: StoreMeeting, note: dict[str, Any] = LATER, report: dict[str, Any] | None = None
) -> tuple[str, str]:
    """The attempt and the verdict, of which there is none for a call that was dismissed."""
    try:
        attempt = meeting.join(note, behind=_by_step, prepare=lambda: None)
        word = {"word": f"part {meeting.member}"} if report is None else report
        return attempt, meeting.settle(word, _words) if attempt else ""
    finally:
        meeting.leave()


def _together(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """What each of the calls, all at the same time, returns or raises."""

    def outcome(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except CommError as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(outcome, calls))


@pytest.fixture
def store() -> dist.Store:
    """A store whose ranks are in this process."""
    return dist.HashStore()


@pytest.fixture
def meet(store: dist.Store) -> Callable[..., StoreMeeting]:
    """Make a meeting as one of three ranks has it; they are called 4, 5 and 6."""
    place = uuid.uuid4().hex

    def make(member: int, timeout_s: float = TIMEOUT_S) -> StoreMeeting:
        return StoreMeeting(store, place, ("4", "5", "6"), member, timeout_s)

    return make


def test_ranks_that_are_there_are_one_attempt(meet: Callable[..., StoreMeeting]) -> None:
    """Of one name, and all hear what the first decides from the reports of all, by rank."""
    outcomes = _together([partial(_save, meet(member)) for member in range(3)])
    assert len({attempt for attempt, _ in outcomes}) == 1
    assert [verdict for _, verdict in outcomes] == ["part 0 part 1 part 2"] * 3
    assert all(attempt for attempt, _ in outcomes)


def test_nobody_goes_on_before_the_first_has_made_room(meet: Callable[..., StoreMeeting]) -> None:
    """What an earlier attempt has left is removed, and nothing of this one."""
    log: list[str] = []

    def join(member: int) -> None:
        make_room = partial(log.append, "room")
        meet(member).join(LATER, behind=_by_step, prepare=make_room)
        log.append("joined")

    _together([partial(join, member) for member in range(3)])
    assert log == ["room", "joined", "joined", "joined"]


def test_store_does_not_fill_up(meet: Callable[..., StoreMeeting], store: dist.Store) -> None:
    """However many saves there are: each removes what the one before has left."""
    kept = []
    for _ in range(4):
        _together([partial(_save, meet(member)) for member in range(3)])
        kept.append(store.num_keys())
    assert kept[1:] == [kept[1]] * 3


def test_call_of_an_earlier_step_is_dismissed_and_the_next_one_joins(
    meet: Callable[..., StoreMeeting],
) -> None:
    """The others wait for it, whoever it is."""
    for late in range(3):

        def twice(late: int = late) -> tuple[Any, Any]:
            return _save(meet(late), EARLIER), _save(meet(late))

        calls: list[Callable[[], Any]] = [partial(_save, meet(member)) for member in range(3)]
        calls[late] = twice
        outcomes = _together(calls)
        first, outcomes[late] = outcomes[late]
        assert first == ("", "")
        assert len(set(outcomes)) == 1


def test_rank_that_does_not_come_is_named(meet: Callable[..., StoreMeeting]) -> None:
    """By the first rank, and by another one that waits with it."""
    for member, other in ((0, 1), (1, 0)):
        meet(other)._set(f"call/{other}", {"call": "waits, too", **LATER})
        with pytest.raises(CommError) as raised:
            _save(meet(member, 0.05))
        assert str(raised.value) == (
            "flat_param.save_sharded: rank 6 did not answer within 0.05 s, but every rank must "
            "call save_sharded after the same step. Call it on all ranks, again on all after an "
            "error."
        )


def test_rank_that_waits_alone_names_all_others(meet: Callable[..., StoreMeeting]) -> None:
    """It has not come itself, to those that come later."""
    for member, names in ((0, "5, 6"), (2, "4, 5")):
        with pytest.raises(CommError, match=f"rank {names} did not answer within 0.05 s"):
            _save(meet(member, 0.05))


def test_first_rank_is_named_where_all_are_there_and_nothing_begins(
    meet: Callable[..., StoreMeeting], store: dist.Store
) -> None:
    """It has died in its call, and so has not taken its name away."""
    for member in (0, 2):
        meet(member)._set(f"call/{member}", {"call": "of a process that is gone"})
    with pytest.raises(CommError, match="rank 4 did not answer"):
        _save(meet(1, 0.05))


def test_rank_that_leaves_before_it_reports_ends_the_attempt(
    meet: Callable[..., StoreMeeting],
) -> None:
    """All others hear who it was, and nobody waits for it."""

    def leaves() -> str:
        meeting = meet(1)
        meeting.join(LATER, behind=_by_step, prepare=lambda: None)
        meeting.leave()
        return "left"

    first, left, last = _together([partial(_save, meet(0)), leaves, partial(_save, meet(2))])
    assert left == "left"
    assert "rank 5 has left the save" in first[1]
    assert first == last


def test_leader_that_leaves_is_named_by_the_others(meet: Callable[..., StoreMeeting]) -> None:
    """Before it has decided; they do not wait for the timeout."""

    def leaves() -> None:
        meeting = meet(0)
        meeting.join(LATER, behind=_by_step, prepare=lambda: None)
        meeting.leave()

    _, *errors = _together([leaves, *(partial(_save, meet(member)) for member in (1, 2))])
    for error in errors:
        assert "rank 4 has left the save before it was decided" in str(error)


def test_error_of_one_rank_is_heard_without_the_reports_of_the_others(
    meet: Callable[..., StoreMeeting],
) -> None:
    """A part may take minutes to write, and would be of no use."""
    calls = [
        partial(_join_and_settle, meet(0), {"word": "part 0"}),
        partial(_join_and_settle, meet(1), {"error": "the disk is full"}),
        partial(meet(2).join, LATER, behind=_by_step, prepare=lambda: None),
    ]
    first, second, _ = _together(calls)
    assert first == second
    assert first.endswith("the disk is full")


def _join_and_settle(meeting: StoreMeeting, report: dict[str, Any]) -> str:
    meeting.join(LATER, behind=_by_step, prepare=lambda: None)
    return meeting.settle(report, _words)


def test_store_that_is_gone_is_said_to_be() -> None:
    """With what to do."""

    class Gone:
        def set(self, key: str, value: str) -> None:
            pass

        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("connection reset")

    with pytest.raises(CommError, match="the process group's store does not answer, but ranks"):
        _save(StoreMeeting(Gone(), "gone", ("0", "1"), 0, TIMEOUT_S))  # type: ignore[arg-type]


def test_leader_goes_last(meet: Callable[..., StoreMeeting]) -> None:
    """The store may be in its process: it waits until the others have heard."""
    ended: list[int] = []

    def late(member: int) -> None:
        meeting = meet(member)
        attempt = meeting.join(LATER, behind=_by_step, prepare=lambda: None)
        assert meeting.settle({"word": ""}, lambda _: "") == ""
        assert attempt
        if member:
            time.sleep(0.1)
            ended.append(member)
        meeting.leave()
        if not member:
            ended.append(member)

    _together([partial(late, member) for member in range(3)])
    assert ended[-1] == 0


def test_leader_does_not_wait_long_for_one_that_died(
    meet: Callable[..., StoreMeeting], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After its report, which was good, and before it could leave."""
    monkeypatch.setattr(_store_meeting, "_HEARD_WITHIN_S", 0.2)

    def dies(member: int) -> float:
        meeting = meet(member)
        meeting.join(LATER, behind=_by_step, prepare=lambda: None)
        start = time.monotonic()
        assert meeting.settle({"word": ""}, lambda _: "") == ""
        return time.monotonic() - start

    leader, *_ = _together([partial(dies, member) for member in range(3)])
    assert 0.2 <= leader < TIMEOUT_S
