"""Offload on an accelerator: which memory is held, for how long, and after a failure."""

from __future__ import annotations

import copy
import gc

import pytest
import torch

from ckpt_wrap import _offload_scheduler, offload_, offload_stats
from ckpt_wrap._host_tier import HostTier

from ._devices import (
    FAR_AHEAD,
    ON_AN_ACCELERATOR,
    SIM,
    SIMULATED,
    SLOW_COPIES,
    blocks,
    device,
    found,
    given,
    offloaded,
    same,
    simulate,
    synchronize,
)

pytestmark = [*ON_AN_ACCELERATOR, pytest.mark.usefixtures("no_race")]


def test_a_graph_that_is_dropped_lets_go_of_its_sources_in_order():
    """Copy-outs are still running, and the memory is reused at once."""
    model = offloaded(blocks(3, device()))
    simulate(**SLOW_COPIES)
    for _ in range(3):
        y = model(given(device()))
        del y
        torch.zeros(128, 256, device=device())
    assert sum(offload_stats(block).bytes_away for block in model) == 0


def test_what_was_fetched_and_is_not_read_is_let_go_of_in_order():
    """Only the later half needs gradients, so the prefetch for the call before is not used."""
    model = offloaded(blocks(4, device()))
    simulate(**SLOW_COPIES)
    h = model[:2](given(device()))
    loss = model[2:](h).sum()
    torch.autograd.grad(loss, h)
    del loss, h
    torch.zeros(128, 256, device=device())


def test_after_backward_nothing_is_held():
    """Memory is released whether or not the module is called again."""
    model = offloaded(blocks(4, device()))
    model(given(device())).sum().backward()
    synchronize()
    model.zero_grad()
    gc.collect()
    before = torch.accelerator.memory_allocated()
    simulate(**SLOW_COPIES)
    model(given(device())).sum().backward()
    simulate()
    synchronize()
    model.zero_grad()
    gc.collect()
    assert sum(offload_stats(block).bytes_away for block in model) == 0
    assert torch.accelerator.memory_allocated() <= before


def reserved() -> int:
    """Bytes that the allocator has reserved for live tensors."""
    synchronize()
    gc.collect()
    torch.accelerator.empty_cache()
    return torch.accelerator.memory_reserved()


def held_bytes(model, **costs) -> int:
    """Peak of the reserved bytes in the second of two steps."""
    for _ in range(2):
        reserved()
        torch.accelerator.reset_peak_memory_stats()
        x = given(device(), 512)
        simulate(**costs)
        model(x).square().sum().backward()
        del x
        simulate()
        synchronize()
        peak = torch.accelerator.max_memory_reserved()
        model.zero_grad()
    return peak


@SIMULATED
@pytest.mark.parametrize("calls", ["one for each block", "one"])
def test_memory_does_not_grow_with_how_far_the_host_is_ahead(calls, monkeypatch):
    """Twelve blocks reserve at most 0.45 of the plain model's bytes."""
    others = reserved()  # by earlier tests
    plain = blocks(12, device())
    if calls == "one":
        monkeypatch.setattr(_offload_scheduler, "INFLIGHT_BYTES", 1 << 20)
        moved = offload_(copy.deepcopy(plain))
    else:
        moved = offloaded(plain)
    ahead = held_bytes(moved, **FAR_AHEAD) - others
    del moved
    assert ahead <= 0.45 * (held_bytes(plain, **FAR_AHEAD) - others)


@SIMULATED
def test_copies_that_take_half_as_long_as_kernels_are_hidden():
    """A step of twelve blocks takes at most 1.03 of the plain step, on the device's clock."""
    plain = blocks(12, device())
    took = []
    for model in (plain, offloaded(plain)):
        for _ in range(2):
            x = given(device(), 512)
            synchronize()
            simulate(**FAR_AHEAD)
            begin = SIM.host_us()
            model(x).square().sum().backward()
            synchronize()
            took.append(SIM.host_us() - begin)
            simulate()
    assert took[3] <= 1.03 * took[1]


@SIMULATED
def test_a_copy_that_fails_is_told_and_nothing_stays(monkeypatch):
    """The failing step raises, and the next step is correct."""
    plain = blocks(3, device())
    moved = offloaded(plain)
    x = given(device())
    SIM.fail_later("copy to host", after=2)
    with pytest.raises(RuntimeError, match="a fault was asked for"):
        moved(x).sum().backward()
        synchronize()
    gc.collect()
    x.grad = None
    moved.zero_grad()
    assert sum(offload_stats(block).bytes_away for block in moved) == 0
    results = []
    for model in (plain, moved):
        x = given(device())
        model(x).square().sum().backward()
        results.append(found([model], [x]))
    assert same(*results)


def test_what_another_stream_read_is_not_handed_out_before_it_did():
    """Memory of one stream is read on another; the owner's next tensor must not reuse it early."""
    tier, side, nbytes = HostTier(), torch.Stream(device()), 1 << 16
    out = tier.copy_out(torch.full((nbytes,), 7, dtype=torch.uint8, device=device()))
    out.release()
    synchronize()
    main = torch.accelerator.current_stream(device())
    simulate(**SLOW_COPIES)
    copied = tier.copy_in(out)
    with side:
        copied.wait()
        read = copied.tensor.clone()
    copied.release()
    del copied
    torch.zeros(nbytes, dtype=torch.uint8, device=device())  # on the owner's stream
    main.wait_stream(side)
    read.record_stream(main)
    assert bool((read == 7).all())
