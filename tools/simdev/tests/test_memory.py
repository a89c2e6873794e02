"""The allocator's rules, and running out of memory at a chosen size."""

from __future__ import annotations

import gc

import pytest
import torch

MIB = 2**20


def test_freed_memory_is_handed_out_again_on_its_own_stream(sim, device, side):
    """At once, although kernels that use it are still queued; not on another stream."""
    with sim.stalled():
        a = torch.ones(256, device=device)
        place = a.data_ptr()
        del a
        with sim.stream(side):
            other = torch.empty(256, device=device)
        same = torch.empty(256, device=device)
        assert same.data_ptr() == place
        assert other.data_ptr() != place


def test_a_recorded_stream_holds_memory_back_until_the_host_sees_it_done(sim, device, side):
    """With `record_stream` and a host that is ahead: no longer allocated, but not free either."""
    a = torch.ones(MIB // 4, device=device)
    side.wait_stream(sim.current_stream())
    before = sim.memory()
    with sim.stalled(side):
        with sim.stream(side):
            a.mul(2)
        a.record_stream(side)
        del a
        held = sim.memory()
        assert held["allocated"] <= before["allocated"] - MIB + 4096 + MIB  # the result of mul
        assert held["active"] >= before["active"]
    sim.synchronize()
    gc.collect()
    assert sim.memory()["active"] < before["active"]


def test_recording_the_owner_costs_nothing(sim, device):
    """As with CUDA's allocator: the stream's order protects the memory."""
    with sim.stalled():
        a = torch.ones(MIB // 4, device=device)
        before = sim.memory()["active"]
        a.record_stream(sim.current_stream())
        del a
        assert sim.memory()["active"] == before - MIB


def test_what_is_freed_is_poisoned(sim, device):
    """So that its next owner cannot find valid values by chance."""
    a = torch.ones(256, device=device)
    del a
    b = torch.empty(256, device=device)
    assert torch.isnan(b).all()


@pytest.mark.parametrize("free_first", [False, True])
def test_memory_is_out_at_the_byte_that_was_chosen(sim, device, free_first):
    """Cached memory is released first."""
    sim.empty_cache()
    used = sim.memory()["reserved"]
    a = torch.empty(MIB, dtype=torch.uint8, device=device)
    sim.limit(used + 2 * MIB)
    if free_first:
        del a
        torch.empty(2 * MIB, dtype=torch.uint8, device=device)
    else:
        torch.empty(MIB, dtype=torch.uint8, device=device)
    with pytest.raises(torch.OutOfMemoryError, match="out of memory on device 0, asked for"):
        torch.empty(2 * MIB + 1, dtype=torch.uint8, device=device)
    sim.limit(None)
    torch.empty(2 * MIB + 1, dtype=torch.uint8, device=device)


def test_out_of_memory_waits_for_what_is_held_back_first(sim, device, side):
    """Like CUDA's allocator, which waits instead of failing."""
    sim.empty_cache()
    a = torch.empty(MIB, dtype=torch.uint8, device=device)
    sim.limit(sim.memory()["reserved"] + MIB // 2)
    sim.simulate(kernel_us=20_000)
    side.wait_stream(sim.current_stream())
    with sim.stream(side):
        a[:4].add_(1)
    a.record_stream(side)
    del a
    torch.empty(MIB, dtype=torch.uint8, device=device)


def test_pinned_memory_is_out_at_the_byte_that_was_chosen(sim):
    """Sizes are powers of two, as on CUDA."""
    used = sim.pinned_memory()["reserved"]
    sim.limit_pinned(used + 2 * MIB)
    a = torch.empty(MIB + 1, dtype=torch.uint8, pin_memory=True)
    assert a.is_pinned()
    assert sim.pinned_memory()["reserved"] == used + 2 * MIB
    with pytest.raises(RuntimeError, match="out of pinned memory"):
        torch.empty(MIB, dtype=torch.uint8, pin_memory=True)


def test_torch_reports_the_same_numbers(sim, device):
    """By its functions for any accelerator."""
    a = torch.empty(MIB, dtype=torch.uint8, device=device)
    assert torch.accelerator.memory_allocated() == sim.memory()["allocated"]
    assert torch.accelerator.memory_reserved() == sim.memory()["reserved"]
    torch.accelerator.reset_peak_memory_stats()
    del a
    assert torch.accelerator.max_memory_allocated() == sim.memory()["allocated"] + MIB
    assert sim.max_memory_reserved() >= sim.max_memory_allocated()


def test_storages_can_be_emptied_and_filled_again(sim, device):
    """As sharding libraries do."""
    a = torch.ones(4, device=device)
    a.untyped_storage().resize_(0)
    a.untyped_storage().resize_(16)
    a.fill_(3)
    assert a.tolist() == [3, 3, 3, 3]
