"""Programs with races, which must be reported, and right ones, for which nothing may be."""

from __future__ import annotations

import gc

import pytest
import torch


def tensor(device):
    return torch.ones(1000, device=device)


def pinned():
    return torch.empty(1000, pin_memory=True)


def main_stream():
    return torch.simdev.current_stream()


def test_reading_what_another_stream_writes_is_reported(sim, device, side):
    """The copy's stream did not wait for the kernel that writes the tensor."""
    a, host = tensor(device), pinned()
    sim.races()
    a.add_(1)
    with sim.stream(side):
        host.copy_(a, non_blocking=True)
    (race,) = sim.races()
    assert "copy to host on stream" in race
    assert "reads device block of 4096 bytes of stream 0 without waiting for add.out" in race


@pytest.mark.parametrize("how", ["stream", "event", "host"])
def test_reading_after_a_wait_is_right(sim, device, side, how):
    """A wait of the stream, of an event on it, or of the host."""
    a, host = tensor(device), pinned()
    a.add_(1)
    if how == "stream":
        side.wait_stream(main_stream())
    elif how == "event":
        side.wait_event(main_stream().record_event())
    else:
        sim.synchronize()
    with sim.stream(side):
        host.copy_(a, non_blocking=True)
    assert sim.races() == []
    assert host[0] == 2


def test_an_event_that_came_too_early_is_no_wait(sim, device, side):
    """It does not cover operations queued after it."""
    a = tensor(device)
    event = main_stream().record_event()
    a.add_(1)
    side.wait_event(event)
    with sim.stream(side):
        a.mul(2)
    assert "without waiting for add.out" in sim.races()[0]


def test_writing_what_another_stream_reads_is_reported(sim, device, side):
    """Two concurrent reads are right; a concurrent write is not."""
    a = tensor(device)
    side.wait_stream(main_stream())
    with sim.stream(side):
        a.mul(2)
    a.mul(3)
    assert sim.races() == []
    with sim.stream(side):
        a.mul(2)
    a.add_(1)
    (race,) = sim.races()
    assert "writes" in race
    assert "still read by mul" in race


def test_freeing_what_another_stream_reads_is_reported(sim, device, side):
    """The owner's stream may reuse the memory at once."""
    a, host = tensor(device), pinned()
    side.wait_stream(main_stream())
    with sim.stream(side):
        host.copy_(a, non_blocking=True)
    del a
    (race,) = sim.races()
    assert race.startswith("freed device block of 4096 bytes of stream 0 is still read by copy")


@pytest.mark.parametrize("how", ["record", "wait", "host"])
def test_freeing_is_right_once_the_owner_waits_or_was_told(sim, device, side, how):
    """By `record_stream`, a wait of the owner's stream, or a wait of the host."""
    a, host = tensor(device), pinned()
    side.wait_stream(main_stream())
    with sim.stream(side):
        host.copy_(a, non_blocking=True)
    if how == "record":
        a.record_stream(side)
    elif how == "wait":
        main_stream().wait_stream(side)
    else:
        side.synchronize()
    del a
    tensor(device)
    assert sim.races() == []


def test_memory_handed_to_another_stream_is_waited_for(sim, device, side):
    """A new tensor may reuse memory that the stream's last kernel still reads."""
    a = tensor(device)
    with sim.stream(side):
        a.zero_()
    assert "without waiting for" in sim.races()[0]


def test_using_one_devices_tensor_from_another_devices_stream_is_ordered(sim, device):
    """Copies between devices wait for both, as on CUDA."""
    a = tensor(device)
    b = a.to("simdev:1")
    assert torch.equal((b + 1).cpu(), (a + 1).cpu())
    assert sim.races() == []


@pytest.mark.parametrize("how", ["torch", "list", "numpy"])
def test_pinned_memory_that_the_host_reads_too_early_is_reported(sim, device, how):
    """By any way of reading; it finds the old contents."""
    a, host = tensor(device), pinned().fill_(5)
    with sim.stalled():
        host.copy_(a, non_blocking=True)
        reads = {"torch": host.clone, "list": host.tolist, "numpy": host.numpy}
        assert reads[how]()[0] == 5
    (race,) = sim.races()
    assert race.startswith("the host uses pinned block of 4096 bytes without waiting for copy to h")
    assert host[0] == 1


@pytest.mark.parametrize("how", ["device", "event", "query"])
def test_pinned_memory_may_be_read_once_the_host_knows_the_copy_done(sim, device, how):
    """By a wait or a query; events of other streams do not count."""
    a, host = tensor(device), pinned()
    early = main_stream().record_event()
    host.copy_(a, non_blocking=True)
    late = main_stream().record_event()
    early.synchronize()
    if how == "device":
        sim.synchronize()
    elif how == "event":
        late.synchronize()
    else:
        while not late.query():
            pass
    assert host.sum() == 1000
    assert sim.races() == []


def test_pinned_memory_that_the_host_writes_too_early_is_reported(sim, device):
    """Reading during a copy from it is right."""
    host = pinned().fill_(1)
    with sim.stalled():
        a = host.to(device, non_blocking=True)
        assert host[0] == 1
        host.zero_()
    (race,) = sim.races()
    assert race.startswith(
        "the host writes pinned block of 4096 bytes without waiting for copy to d"
    )
    del a


def test_pinned_memory_goes_back_when_its_copies_are_done(sim, device):
    """It is not reused before."""
    a, host = tensor(device), pinned()
    place = host.data_ptr()
    with sim.stalled():
        host.copy_(a, non_blocking=True)
        del host
        other = pinned()
        assert other.data_ptr() != place
    sim.synchronize()
    assert pinned().data_ptr() == place
    del other


def test_autograd_on_one_stream_has_no_race(sim, device):
    """Backward threads wait as torch makes them."""
    sim.simulate(kernel_us=200, jitter=True)
    w = torch.randn(8, 8, device=device, requires_grad=True)
    loss = (torch.tanh(w @ w) @ w).sum()
    loss.backward()
    del loss
    gc.collect()
    assert sim.races() == []


def test_nothing_is_reported_where_checks_are_off(sim, device, side):
    """For programs that measure time."""
    sim.simulate(check=False)
    a = tensor(device)
    with sim.stream(side):
        a.zero_()
    sim.simulate()
    assert sim.races() == []
