"""Copies beside the work of a device: who waits for whom, and who owns the memory."""

from __future__ import annotations

import pytest
import torch

from ckpt_wrap.offload._host_tier import StreamCopy, StreamLink


class Stream:
    """A stream that notes which events its later work waits for."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.waits: list[object] = []

    def wait_event(self, event) -> None:
        self.waits.append(event)


class Running:
    """An event of a copy that has not ended."""

    def query(self) -> bool:
        return False


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
    copy = StreamCopy(memory, torch.empty(0), stream, event)
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
