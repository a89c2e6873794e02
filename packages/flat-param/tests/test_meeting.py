"""Where the ranks of one save meet: through the store, in collectives, or each alone."""

from __future__ import annotations

import threading
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from flat_param.checkpoint import _meeting
from flat_param.checkpoint._meeting import CollectiveMeeting, meeting_of, share_over
from flat_param.checkpoint._store_meeting import StoreMeeting

TIMEOUT_S = 10.0


def _none(notes):
    """Nobody is behind."""
    return set()


class Comm:
    """A communicator's rank and ranks; shares what a list says the others give."""

    def __init__(self, rank, ranks, others=None):
        self.rank, self.world_size = rank, len(ranks)
        self.board = SimpleNamespace(ranks=tuple(ranks))
        self._others = others

    def share(self, value):
        return self._others(value)


def _comms(rank, gather, replicate=(0,)):
    """Of a mesh whose rows are copies, as one rank of it has them."""
    part, copy = rank % len(gather), rank // len(gather)
    row = [copy * len(gather) + each for each in range(len(gather))]
    column = [each * len(gather) + part for each in range(len(replicate))]
    return [Comm(part, row), Comm(copy, column)]


@pytest.fixture
def store(monkeypatch):
    """torch's store, as `default_store` hands it out."""
    made = dist.HashStore()
    made.set_timeout(timedelta(seconds=TIMEOUT_S))
    monkeypatch.setattr(_meeting, "default_store", lambda: made)
    return made


def test_rank_alone_meets_nobody(monkeypatch):
    """It needs no store, leads, and hears its own report."""
    monkeypatch.setattr(_meeting, "default_store", lambda: pytest.fail("no store is needed"))
    meeting, log = meeting_of(_comms(0, [0]), None), []
    attempt = meeting.join({}, behind=_none, prepare=lambda: log.append("room"))
    assert len(attempt) == 12
    assert log == ["room"]
    assert meeting.settle({"is": "well"}, lambda reports: f"{reports}") == "[{'is': 'well'}]"
    meeting.leave()
    again = meeting.join({}, behind=_none, prepare=lambda: None)
    assert again != attempt


class Round:
    """Collectives of ranks that are threads: every one gives a value, and has those of all."""

    def __init__(self, world):
        self._barrier, self._values = threading.Barrier(world, timeout=TIMEOUT_S), [None] * world

    def meeting(self, member):
        def share(value):
            self._values[member] = value
            self._barrier.wait()
            found = list(self._values)
            self._barrier.wait()
            return found

        return CollectiveMeeting(share, member)


def _together(*calls):
    """What each call returns or raises, each in a thread of its own."""
    found = [None] * len(calls)

    def run(at, call):
        try:
            found[at] = call()
        except Exception as error:
            found[at] = error

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * TIMEOUT_S)
    return found


def _save(meeting, note=None, *, prepare=lambda: None, decide=str, behind=_none):
    attempt = meeting.join(note or {}, behind=behind, prepare=prepare)
    return attempt, attempt and meeting.settle({"by": meeting.member}, decide)


def test_without_a_store_ranks_meet_in_collectives(monkeypatch):
    """All hear the leader's attempt and its decision, from the reports of all."""
    monkeypatch.setattr(_meeting, "default_store", lambda: None)
    assert isinstance(meeting_of(_comms(0, [0, 1]), None), CollectiveMeeting)
    round_of, log = Round(3), []
    found = _together(
        *(
            partial(_save, round_of.meeting(member), prepare=partial(log.append, member))
            for member in range(3)
        )
    )
    assert len(set(found)) == 1
    attempt, verdict = found[0]
    assert len(attempt) == 12
    assert verdict == "[{'by': 0}, {'by': 1}, {'by': 2}]"
    assert log == [0]


def test_notes_of_all_are_compared_in_collectives_too():
    """Who saves another model, or another step, is seen by every rank."""
    round_of, heard = Round(2), [[], []]

    def notes(member, told):
        heard[member][:] = told
        return set()

    _together(
        *(
            partial(
                _save, round_of.meeting(member), {"step": member}, behind=partial(notes, member)
            )
            for member in range(2)
        )
    )
    assert heard == [[{"step": 0}, {"step": 1}]] * 2


@pytest.mark.parametrize("late", [0, 1])
def test_rank_that_is_behind_is_an_error_of_all(late):
    """It cannot be dismissed: its next collective would not be that in which the others wait."""
    round_of = Round(2)

    def by_step(notes):
        steps = [note["step"] for note in notes]
        return {rank for rank, step in enumerate(steps) if step < max(steps)}

    found = _together(
        *(
            partial(_save, round_of.meeting(at), {"step": at != late}, behind=by_step)
            for at in range(2)
        )
    )
    assert [str(error) for error in found] == [
        f"flat_param.save_sharded: ranks at [{late}] of the group are at an earlier step than the "
        "others, but a checkpoint is of one step. Call it on all ranks after the same step."
    ] * 2


@pytest.mark.parametrize("where", ["prepare", "decide"])
def test_error_of_the_leader_is_raised_by_all(where):
    """Nobody waits in a collective for a rank that does not come."""
    round_of = Round(2)

    def fail(*_):
        raise OSError("the disk is gone")

    led, other = _together(
        *(partial(_save, round_of.meeting(member), **{where: fail}) for member in range(2))
    )
    assert isinstance(led, OSError)
    assert str(other) == (
        "flat_param.save_sharded: the first rank has left the save (the disk is gone), but it "
        "leads the save. Call save_sharded again on all ranks."
    )


def test_who_leads_is_first_in_both_directions(monkeypatch):
    """Of a mesh one rank leads, not one of each copy."""
    monkeypatch.setattr(_meeting, "default_store", lambda: None)
    found = [meeting_of(_comms(rank, [0, 1], [0, 1]), None).member for rank in range(4)]
    assert found == [0, 1, 2, 3]


@pytest.mark.parametrize(("parts", "copies"), [(3, 1), (1, 3), (2, 2)])
def test_all_ranks_of_a_mesh_come_to_one_place(store, parts, copies):
    """Whatever the order in which they come; members are numbered by copy and part."""
    found, world = {}, parts * copies

    def come(rank):
        found[rank] = meeting_of(_comms(rank, range(parts), range(copies)), TIMEOUT_S)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in reversed(range(world))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(type(meeting) is StoreMeeting for meeting in found.values())
    saves = {}

    def save(rank):
        attempt = found[rank].join({}, behind=lambda notes: set(), prepare=lambda: None)
        verdict = found[rank].settle({"rank": rank}, lambda reports: f"{reports}")
        found[rank].leave()
        saves[rank] = attempt, verdict

    threads = [threading.Thread(target=save, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(saves.values())) == 1
    assert saves[0][1] == f"{[{'rank': rank} for rank in range(world)]}"


def test_two_units_of_other_ranks_meet_in_other_places(store):
    """One group's save does not wait for another's."""
    ranks = [[Comm(0, row), Comm(0, row[:1])] for row in ([0, 1], [2, 3], [0, 1])]
    first, other, again = (meeting_of(comms, TIMEOUT_S) for comms in ranks)
    assert first.place == again.place != other.place


def test_time_to_wait_is_the_stores_or_the_callers(store):
    """Of seconds."""
    comms = _comms(0, [0, 1])
    assert meeting_of(comms, None).timeout_s == TIMEOUT_S
    assert meeting_of(comms, 1.5).timeout_s == 1.5


def test_value_goes_round_in_both_directions():
    """Over the first communicator, then what all there have over the second."""
    row = Comm(0, [0, 1], lambda values: [values, ["b"]])
    column = Comm(0, [0, 2], lambda values: [values, ["c", "d"]])
    assert share_over([row, column], "a") == ["a", "b", "c", "d"]
    assert share_over([], "a") == ["a"]
