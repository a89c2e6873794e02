"""One storage on its way elsewhere and back: kept, leaving, away, and who may read it when."""

from __future__ import annotations

import gc
import os
import threading

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ckpt_wrap import OffloadError
from ckpt_wrap.offload._disk_tier import DiskTier
from ckpt_wrap.offload._offload_stats import Counters, OffloadStats
from ckpt_wrap.offload._offloaded_storage import OffloadedStorage


class Copying:
    """Bytes on a device's way elsewhere: the copy has ended when the test says so."""

    is_immediate = False

    def __init__(self) -> None:
        self.log: list[str] = []
        self.ended = False

    def take(self, source):
        self.bytes = source.clone()
        self.log.append("take")

    def copied(self):
        return self.ended

    def release_source(self):
        self.log.append("release source")

    def fetch(self):
        self.log.append("fetch")
        return self.bytes.clone()

    def wait_fetched(self):
        self.log.append("wait")

    def release_fetched(self):
        self.log.append("release fetched")

    def discard(self):
        self.log.append("discard")


class Place:
    """A tier with one place."""

    idle = False

    def __init__(self, stored) -> None:
        self.stored = stored

    def place(self, source):
        return self.stored


@pytest.fixture
def tensor():
    """What is saved."""
    return torch.arange(4.0)


@pytest.fixture
def copying():
    """A place whose copies take their time."""
    return Copying()


def stored(tensor, counters=None):
    """The storage of a tensor, kept."""
    return OffloadedStorage(tensor, counters or Counters({}), "'block' (Block)")


def values(storage):
    """What reading it gives."""
    return storage.read().view(torch.float32).tolist()


def test_what_is_kept_or_leaving_is_read_where_it_is(tensor, copying):
    """Without a copy, and nothing is fetched."""
    storage = stored(tensor)
    assert storage.read().data_ptr() == tensor.data_ptr()
    assert storage.leave(Place(copying))
    assert storage.read().data_ptr() == tensor.data_ptr()
    storage.start_fetch()
    assert copying.log == ["take"]


def test_what_is_away_is_fetched_once_and_waited_for_each_time(tensor, copying):
    """Until it is let go of; then it is fetched again."""
    storage = stored(tensor)
    storage.leave(Place(copying))
    storage.drop_source()
    storage.start_fetch()
    assert values(storage) == values(storage) == [0.0, 1.0, 2.0, 3.0]
    storage.drop_fetched()
    storage.drop_fetched()
    assert values(storage) == [0.0, 1.0, 2.0, 3.0]
    assert copying.log == [
        *("take", "release source", "fetch", "wait", "wait", "release fetched", "fetch", "wait")
    ]


def test_a_storage_leaves_once(tensor, copying):
    """Whoever asks again is told that it did not begin now."""
    storage = stored(tensor)
    assert storage.leave(Place(copying))
    assert not storage.leave(Place(copying))
    storage.drop_source()
    assert not storage.leave(Place(copying))
    assert copying.log.count("take") == 1


def test_a_source_that_has_not_left_is_not_dropped(tensor):
    """There would be nothing to read."""
    storage = stored(tensor)
    storage.drop_source()
    assert storage.read().data_ptr() == tensor.data_ptr()
    assert not storage.copied()


def test_copied_is_when_nothing_reads_the_source(tensor, copying):
    """Not while it is kept or the copy runs; and once it is away."""
    storage = stored(tensor)
    assert not storage.copied()
    storage.leave(Place(copying))
    assert not storage.copied()
    copying.ended = True
    assert storage.copied()
    copying.ended = False
    storage.drop_source()
    assert storage.copied()


@pytest.mark.parametrize("state", ["kept", "leaving", "away"])
def test_a_change_in_place_is_an_error_in_each_state(tensor, copying, state):
    """On a device a copy may have read either; the error says whose tensor it is."""
    storage = stored(tensor)
    if state != "kept":
        storage.leave(Place(copying))
    if state == "away":
        storage.drop_source()
    tensor.add_(1)
    with pytest.raises(OffloadError) as caught:
        storage.read()
    assert str(caught.value) == (
        "ckpt_wrap.offload_: a tensor saved by module 'block' (Block) was changed in place after "
        "it was saved, but backward needs it as it was. Change a clone of it, or change it after "
        "backward."
    )


def test_in_a_folder_it_is_as_it_was_saved(tensor, tmp_path):
    """All bytes are there when it left, so a later change is no error."""
    storage = stored(tensor)
    storage.leave(DiskTier(tmp_path))
    storage.drop_source()
    tensor.add_(1)
    assert values(storage) == [0.0, 1.0, 2.0, 3.0]


def test_the_bytes_on_the_device_go_with_the_source(copying):
    """What tells a change holds none of them."""
    tensor = torch.arange(4.0)
    storage = stored(tensor)
    storage.leave(Place(copying))
    gone = StorageWeakRef(tensor.untyped_storage())
    del tensor
    assert not gone.expired()
    storage.drop_source()
    gc.collect()
    assert gone.expired()


def test_what_is_stored_goes_with_the_storage(tensor, copying):
    """And is away no more, in the counts."""
    counters = Counters({})
    storage = stored(tensor, counters)
    storage.leave(Place(copying))
    storage.drop_source()
    storage.read()
    assert counters.snapshot() == OffloadStats(
        copies_out=1,
        bytes_out=16,
        copies_in=1,
        bytes_in=16,
        bytes_away=16,
        peak_bytes_away=16,
        late=1,
    )
    del storage
    gc.collect()
    assert copying.log[-1] == "discard"
    assert counters.snapshot().bytes_away == 0


def test_it_is_shared_while_unchanged_and_in_its_process(tensor, monkeypatch):
    """A child makes its own: its parent removes what it stored."""
    storage = stored(tensor)
    assert storage.shares(tensor.view(2, 2))
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert not storage.shares(tensor)
    monkeypatch.undo()
    tensor.add_(1)
    assert not storage.shares(tensor)


def test_an_error_of_the_place_says_whose_tensor_it_is(tensor):
    """Where it is taken and where it is fetched; it is kept in the first case."""

    class Full(Copying):
        def take(self, source):
            raise OffloadError("No space.")

        def fetch(self):
            raise OffloadError("Gone.")

    storage = stored(tensor)
    with pytest.raises(OffloadError, match=r"^No space\. This was for a tensor saved by module 'b"):
        storage.leave(Place(Full()))
    assert values(storage) == [0.0, 1.0, 2.0, 3.0]
    full = Full()
    full.take = lambda source: None
    storage.leave(Place(full))
    storage.drop_source()
    with pytest.raises(OffloadError, match=r"^Gone\. This was for a tensor saved by module 'b"):
        storage.start_fetch()


def test_threads_fetch_it_once(tensor, copying):
    """Each reads the same bytes."""
    fetching = threading.Event()
    fetch = copying.fetch

    def slowly():
        fetching.wait(1)
        return fetch()

    copying.fetch = slowly
    storage = stored(tensor)
    storage.leave(Place(copying))
    storage.drop_source()
    found = []
    threads = [threading.Thread(target=lambda: found.append(storage.read())) for _ in range(4)]
    for thread in threads:
        thread.start()
    fetching.set()
    for thread in threads:
        thread.join()
    assert copying.log.count("fetch") == 1
    assert len({read.data_ptr() for read in found}) == 1
