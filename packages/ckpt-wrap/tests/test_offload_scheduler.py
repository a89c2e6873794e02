"""The schedule of copies, over a link whose events finish when the test says so."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ckpt_wrap import _offload, _offload_scheduler
from ckpt_wrap._host_tier import HostTier
from ckpt_wrap._options import OffloadOptions


class ManualCopy:
    """A copy that has been made, and says so when told."""

    def __init__(self, log, label, tensor, host) -> None:
        self.log, self.label, self.tensor, self.host = log, label, tensor, host
        self.finished = self.waited = False

    def done(self) -> bool:
        return self.finished

    def wait(self) -> None:
        self.waited = True
        self.log.append(f"wait {self.label}")

    def release(self) -> None:
        tensor, self.tensor = self.tensor, None
        if tensor is not None and not (self.finished or self.waited):
            self.log.append(f"hold {self.label}")


class ManualLink:
    """Copies at once, but says it has only when told; notes every call."""

    idle = False
    place = HostTier.place

    def __init__(self) -> None:
        self.log: list[str] = []
        self.out: list[ManualCopy] = []

    def takes(self, device) -> bool:
        return device.type == "cpu"

    def copy_out(self, source):
        label = f"out {len(self.out)}"
        self.log.append(label)
        self.out.append(ManualCopy(self.log, label, source, source.clone()))
        return self.out[-1]

    def copy_in(self, out):
        label = f"in of {out.label}"
        self.log.append(label)
        return ManualCopy(self.log, label, out.host.clone(), out.host)


@pytest.fixture
def link(monkeypatch):
    """A link whose copies finish when the test says so; offload made in the test uses it."""
    link = ManualLink()
    monkeypatch.setattr(
        _offload,
        "scheduler_for",
        lambda options: _offload_scheduler.OffloadScheduler(link, options),
    )
    return link


def _offloads(**options):
    return _offload.Offload(OffloadOptions(**{"min_bytes": 0, **options}))


def _leaving_bytes(link):
    return sum(each.tensor.numel() for each in link.out if each.tensor is not None)


class Square(nn.Module):
    def forward(self, x):
        return (x + 0) * (x * 1)


def _finish(link):
    for event in link.out:
        event.finished = True


def test_backward_fetches_what_is_away_and_waits_for_it(link):
    """Copies go out in forward; in backward each comes in once and is waited for."""
    offload = _offloads()
    x = torch.randn(8, requires_grad=True)
    loss = offload(Square(), x).sum()
    assert link.log == ["out 0", "out 1"]
    _finish(link)
    link.log.clear()
    loss.backward()
    assert torch.equal(x.grad, 2 * x.detach())
    assert sorted(link.log) == [
        "in of out 0",
        "in of out 1",
        "wait in of out 0",
        "wait in of out 1",
    ]
    assert offload.stats.copies_in == 2


def test_what_is_still_leaving_is_read_where_it_is(link):
    """A backward that comes before the copy is made uses the source: nothing comes in."""
    offload = _offloads()
    x = torch.randn(8, requires_grad=True)
    offload(Square(), x).sum().backward()
    assert not any(event.startswith("in") for event in link.log)
    assert torch.equal(x.grad, 2 * x.detach())


def test_bytes_in_flight_are_bounded_by_a_wait_of_the_device(link, monkeypatch):
    """Above the bound the oldest copy is waited for and its source let go."""
    monkeypatch.setattr(_offload_scheduler, "INFLIGHT_BYTES", 32)
    offload = _offloads()
    x = torch.randn(8, requires_grad=True)
    loss = offload(Square(), x).sum()
    assert link.log == ["out 0", "out 1", "hold out 0"]
    assert _leaving_bytes(link) == 32
    del loss


def test_the_device_waits_for_the_copies_of_one_call_when_the_next_one_ends(link):
    """However far the host is ahead, no more than two calls' sources are held."""
    offload = _offloads()
    x = torch.randn(8, requires_grad=True)
    y = offload(Square(), x)
    assert _leaving_bytes(link) == 64
    loss = offload(Square(), y).sum()
    assert link.log == ["out 0", "out 1", "out 2", "out 3", "hold out 0", "hold out 1"]
    assert _leaving_bytes(link) == 64
    loss.backward()
    assert torch.equal(x.grad, 4 * x.detach() ** 3)


def test_there_is_room_again_when_something_is_given_up(link):
    """For what is saved from then on."""
    offload = _offloads(max_bytes_away=64)
    for _ in range(3):
        loss = offload(Square(), torch.randn(8, requires_grad=True)).sum()
        assert offload.stats.bytes_away == 64
        loss = None
    assert loss is None
    assert (offload.stats.copies_out, offload.stats.kept) == (6, 0)


def test_the_end_of_any_call_lets_go_of_what_is_copied(link):
    """Sources do not wait for another tensor to leave."""
    offload = _offloads()
    loss = offload(Square(), torch.randn(8, requires_grad=True)).sum()
    assert _leaving_bytes(link) == 64
    _finish(link)
    offload(nn.Identity(), torch.randn(8))
    assert _leaving_bytes(link) == 0
    del loss


def test_the_call_before_is_fetched_when_backward_enters_the_one_after(link):
    """Reading call 2 starts fetching call 1, before anything of call 1 is asked for."""
    offload = _offloads()
    x = torch.randn(8, requires_grad=True)
    y = offload(Square(), x)
    _finish(link)
    loss = offload(Square(), y).sum()
    _finish(link)
    link.log.clear()
    loss.backward()
    own, *early = link.log[:3]
    assert own in ("in of out 2", "in of out 3")
    assert sorted(early) == ["in of out 0", "in of out 1"]


def test_a_second_read_after_leaving_the_call_fetches_again(link):
    """With `retain_graph`, what was fetched is let go once backward is in another call."""
    offload = _offloads()
    x = torch.randn(8, requires_grad=True)
    y = offload(Square(), x)
    loss = offload(Square(), y).sum()
    _finish(link)
    loss.backward(retain_graph=True)
    before = offload.stats.copies_in
    loss.backward()
    assert offload.stats.copies_in > before
