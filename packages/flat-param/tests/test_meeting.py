"""Where the ranks of one save meet: through the store, in collectives, or each alone."""

from __future__ import annotations

import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from flat_param.checkpoint import _meeting
from flat_param.checkpoint._meeting import CollectiveMeeting, meeting_of, share_over
from flat_param.checkpoint._store_meeting import StoreMeeting

TIMEOUT_S = 10.0


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
    return SimpleNamespace(gather=Comm(part, row), replicate=Comm(copy, column))


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
    attempt = meeting.join({}, behind=lambda notes: {0}, prepare=lambda: log.append("room"))
    assert len(attempt) == 12
    assert log == ["room"]
    assert meeting.settle({"is": "well"}, lambda reports: f"{reports}") == "[{'is': 'well'}]"
    meeting.leave()
    again = meeting.join({}, behind=lambda notes: set(), prepare=lambda: None)
    assert again != attempt


def test_without_a_store_ranks_meet_in_collectives(monkeypatch):
    """All hear the leader's attempt and its decision, from the reports of all."""
    monkeypatch.setattr(_meeting, "default_store", lambda: None)
    assert isinstance(meeting_of(_comms(0, [0, 1]), None), CollectiveMeeting)
    given = {}

    def share(rank):
        def call(value):
            given[rank] = value
            return [given.get(0), value] if rank else [value, given.get(1)]

        return call

    first, second = (CollectiveMeeting(share(rank), leads=rank == 0) for rank in range(2))
    log = []
    attempts = [
        meeting.join({}, behind=lambda notes: set(), prepare=lambda at=at: log.append(at))
        for at, meeting in enumerate((first, second))
    ]
    assert attempts[0] == attempts[1] != ""
    assert log == [0]
    given[1] = "second's"
    assert first.settle("first's", lambda reports: "".join(reports)) == "first'ssecond's"
    given[0] = "decided"
    assert second.settle("second's", lambda reports: pytest.fail("it does not lead")) == "decided"
    first.leave()


def test_who_leads_is_first_in_both_directions(monkeypatch):
    """Of a mesh one rank leads, not one of each copy."""
    monkeypatch.setattr(_meeting, "default_store", lambda: None)
    leads = [meeting_of(_comms(rank, [0, 1], [0, 1]), None).leads for rank in range(4)]
    assert leads == [True, False, False, False]


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
    ranks = [
        SimpleNamespace(gather=Comm(0, row), replicate=Comm(0, row[:1]))
        for row in ([0, 1], [2, 3], [0, 1])
    ]
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
