"""The schedule of copies, over a link whose events finish when the test says so."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ckpt_wrap import OffloadError, OffloadOptions
from ckpt_wrap.offload._host_tier import HostTier, StreamLink
from ckpt_wrap.offload._offload import Offload
from ckpt_wrap.offload._offload_scheduler import OffloadScheduler


class ManualEvent:
    def __init__(self, log, label) -> None:
        self.finished = False
        self.log = log
        self.label = label

    def done(self) -> bool:
        return self.finished

    def wait(self) -> None:
        self.log.append(f"wait {self.label}")


class ManualLink:
    """Copies at once, but says it has only when told; notes every call."""

    idle = False

    def __init__(self) -> None:
        self.log: list[str] = []
        self.out: list[ManualEvent] = []

    def takes(self, device) -> bool:
        return device.type == "cpu"

    def allocate(self, nbytes):
        self.log.append("allocate")
        return torch.empty(nbytes, dtype=torch.uint8)

    def copy_out(self, source, host, after):
        if after is not None:
            after.wait()
        self.log.append(f"out {len(self.out)}")
        host.copy_(source)
        self.out.append(ManualEvent(self.log, f"out {len(self.out)}"))
        return self.out[-1]

    def copy_in(self, host, device, after):
        self.log.append(f"in of {after.label}")
        return host.clone(), ManualEvent(self.log, f"in of {after.label}")


@pytest.fixture
def link():
    """A link whose copies finish when the test says so."""
    return ManualLink()


def _offload(link, **options):
    chosen = OffloadOptions(**{"min_bytes": 0, **options})
    return Offload(chosen, OffloadScheduler(HostTier(link), chosen))


class Square(nn.Module):
    def forward(self, x):
        return (x + 0) * (x * 1)


def _finish(link):
    for event in link.out:
        event.finished = True


def test_backward_fetches_what_is_away_and_waits_for_it(link):
    """Copies go out in forward; in backward each comes in once and is waited for."""
    offload = _offload(link)
    x = torch.randn(8, requires_grad=True)
    loss = offload(Square(), x).sum()
    assert link.log == ["allocate", "out 0", "allocate", "out 1"]
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
    offload = _offload(link)
    x = torch.randn(8, requires_grad=True)
    offload(Square(), x).sum().backward()
    assert not any(event.startswith("in") for event in link.log)
    assert torch.equal(x.grad, 2 * x.detach())


def test_bytes_in_flight_are_bounded_by_a_wait_of_the_device(link):
    """Above the bound the oldest copy is waited for and its source let go."""
    offload = _offload(link, max_inflight_bytes=32)
    x = torch.randn(8, requires_grad=True)
    loss = offload(Square(), x).sum()
    assert link.log == ["allocate", "out 0", "allocate", "out 1", "wait out 0"]
    assert offload._scheduler.order.leaving_bytes == 32
    del loss


def test_the_end_of_any_call_lets_go_of_what_is_copied(link):
    """Sources do not wait for another tensor to leave."""
    offload = _offload(link)
    loss = offload(Square(), torch.randn(8, requires_grad=True)).sum()
    assert offload._scheduler.order.leaving_bytes == 64
    _finish(link)
    offload(nn.Identity(), torch.randn(8))
    assert offload._scheduler.order.leaving_bytes == 0
    del loss


def test_the_call_before_is_fetched_when_backward_enters_the_one_after(link):
    """Reading call 2 starts fetching call 1, before anything of call 1 is asked for."""
    offload = _offload(link)
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


def test_step_two_allocates_nothing_and_waits_for_the_last_use(link):
    """Buffers come from the pool; writing to one waits until it was last read."""
    offload = _offload(link)
    for step in range(3):
        x = torch.randn(8, requires_grad=True)
        loss = offload(Square(), x).sum()
        _finish(link)
        loss.backward()
        del loss
        assert link.log.count("allocate") == 2, step
    assert "wait in of out 0" in link.log


def test_a_source_changed_while_it_is_copied_is_an_error(link):
    """The copy may hold anything then, so backward says so instead."""

    class Keep(nn.Module):
        def forward(self, x):
            self.saved = x * 1
            return self.saved * self.saved

    module = Keep()
    offload = _offload(link)
    loss = offload(module, torch.randn(8, requires_grad=True)).sum()
    with torch.no_grad():
        module.saved.add_(1)
    _finish(link)
    with pytest.raises(OffloadError, match="saved by module Keep was changed in place"):
        loss.backward()


def test_a_second_read_after_leaving_the_call_fetches_again(link):
    """With `retain_graph`, what was fetched is let go once backward is in another call."""
    offload = _offload(link)
    x = torch.randn(8, requires_grad=True)
    y = offload(Square(), x)
    loss = offload(Square(), y).sum()
    _finish(link)
    loss.backward(retain_graph=True)
    before = offload.stats.copies_in
    loss.backward()
    assert offload.stats.copies_in > before


def test_what_is_packed_unpacks_like_torchs_own(link):
    """Each packed object iterates as device and host tensor."""
    offload = _offload(link, min_bytes=9)
    packed = []
    real = torch.autograd.graph.saved_tensors_hooks

    class Noting(real):
        def __init__(self, pack, unpack):
            super().__init__(lambda t: packed.append(pack(t)) or packed[-1], unpack)

    import ckpt_wrap.offload._offload as module

    module.saved_tensors_hooks = Noting
    try:
        x = torch.randn(8, requires_grad=True)
        loss = offload(nn.Sequential(Square(), nn.Linear(8, 1)), x).sum()
    finally:
        module.saved_tensors_hooks = real
    for _, tensor in packed:
        assert tensor.device.type == "cpu"
    assert len(packed) == 4
    loss.backward()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_streams_give_the_plain_gradients_over_steps_of_varying_shape():
    """A hundred steps over real streams: gradients equal, no pinned allocation after step two."""
    chosen = OffloadOptions(min_bytes=0)
    tier = HostTier(StreamLink())
    offload = Offload(chosen, OffloadScheduler(tier, chosen))
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)).cuda()
    for step in range(100):
        x = torch.randn(64 + step % 5, 256, device="cuda", requires_grad=True)
        y = x
        for _ in range(4):
            y = offload(block, y)
        y.sum().backward()
        moved = [p.grad.clone() for p in block.parameters()]
        block.zero_grad()
        z = x.detach().requires_grad_()
        out = z
        for _ in range(4):
            out = block(out)
        out.sum().backward()
        assert all(torch.equal(a, b.grad) for a, b in zip(moved, block.parameters(), strict=True))
        block.zero_grad()
        if step == 10:
            allocations = tier.pool.allocations
    assert tier.pool.allocations == allocations


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_offload_frees_device_memory():
    """After forward, what was saved is no longer on the device."""
    chosen = OffloadOptions(max_inflight_bytes=0)
    offload = Offload(chosen, OffloadScheduler(HostTier(StreamLink()), chosen))
    layers = nn.Sequential(*[nn.Tanh() for _ in range(8)])
    x = torch.randn(1024, 1024, device="cuda", requires_grad=True)
    base = torch.cuda.memory_allocated()
    y = offload(layers, x)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - base <= 2 * x.nbytes
    y.sum().backward()
