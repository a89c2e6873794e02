"""Copies beside the work of a device: who waits for whom, and who owns the memory."""

from __future__ import annotations

import pytest
import torch

from ckpt_wrap.offload._host_tier import HostTier, StreamCopy, StreamLink


class Stream:
    """A stream that notes which events its later work waits for."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.waits: list[object] = []

    def wait_event(self, event) -> None:
        self.waits.append(event)


class Running:
    """An event of a copy, which has not ended."""

    ended = False

    def query(self) -> bool:
        return self.ended


class OnDevice:
    """Memory that notes the streams the allocator is told of."""

    def __init__(self) -> None:
        self.used_on: list[Stream] = []

    def record_stream(self, stream) -> None:
        self.used_on.append(stream)


@pytest.mark.parametrize("own", [True, False], ids=["its own", "another"])
def test_memory_is_let_go_of_when_its_stream_has_waited(own, monkeypatch):
    """Read on another stream, the allocator is told, and its own stream has still to wait."""
    stream, other, event, memory = Stream(), Stream(), Running(), OnDevice()
    current = stream if own else other
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: current)
    copy = StreamCopy(memory, torch.empty(0), stream, event, Stream())
    copy.wait()
    copy.release()
    assert stream.waits == [event]
    assert other.waits == ([] if own else [event])
    assert memory.used_on == ([] if own else [other])


def test_a_device_has_two_streams_and_keeps_them():
    """Copies out come after one another, and so do copies in; neither waits for the other."""
    link, device = StreamLink(), torch.device("cpu")
    out, into = link._of(device)
    assert out is not into
    assert all(a is b for a, b in zip(link._of(device), (out, into), strict=True))


@pytest.mark.parametrize("ended", [True, False])
def test_memory_whose_copy_has_ended_is_let_go_of_at_once(ended):
    """Otherwise its stream waits for the copy; letting go again does nothing."""
    stream, event = Stream(), Running()
    event.ended = ended
    copy = StreamCopy(OnDevice(), torch.empty(0), stream, event, Stream())
    assert copy.done() is ended
    copy.release()
    copy.release()
    assert copy.tensor is None
    assert stream.waits == ([] if ended else [event])


def test_tensors_of_an_accelerator_are_taken():
    """Those of the CPU are on the host already, and those on meta have no bytes."""
    link = StreamLink()
    assert [link.takes(torch.device(d)) for d in ("cpu", "meta", "cuda", "xpu:1")] == [
        *(False, False, True, True)
    ]
    assert link.idle is not torch.accelerator.is_available()
    assert HostTier(link).idle is link.idle


class Log:
    """A link that notes what its copies are told."""

    idle = False

    def __init__(self) -> None:
        self.log: list[str] = []

    def copy_out(self, source):
        return Told(self.log, "out", source)

    def copy_in(self, out):
        assert out.name == "out"
        return Told(self.log, "in", torch.ones(1))


class Told:
    """A copy that notes what it is told."""

    def __init__(self, log, name, tensor) -> None:
        self.log, self.name, self.tensor = log, name, tensor

    def done(self):
        self.log.append(f"{self.name} done?")
        return True

    def wait(self):
        self.log.append(f"{self.name} wait")

    def release(self):
        self.log.append(f"{self.name} release")


def test_a_place_on_the_host_tells_each_copy_its_own():
    """The source is the copy out's, and what was fetched the copy in's."""
    link = Log()
    place = HostTier(link).place(torch.ones(1))
    assert not place.is_immediate
    place.take(torch.ones(1))
    assert place.copied()
    place.release_source()
    assert torch.equal(place.fetch(), torch.ones(1))
    place.wait_fetched()
    place.release_fetched()
    place.release_fetched()
    assert link.log == ["out done?", "out release", "in wait", "in release"]


@pytest.mark.parametrize("fetched", [True, False])
def test_a_discarded_place_lets_go_of_everything_once(fetched):
    """Also of what was fetched and not read, and where nothing was taken."""
    link = Log()
    place = HostTier(link).place(torch.ones(1))
    place.discard()
    place.take(torch.ones(1))
    if fetched:
        place.fetch()
    place.discard()
    place.discard()
    assert link.log == [*(["in release"] if fetched else []), "out release"]
