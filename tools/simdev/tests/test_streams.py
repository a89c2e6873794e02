"""Streams: order, time, faults and stalls."""

from __future__ import annotations

import threading
import time

import pytest
import torch


def test_the_host_does_not_wait_for_kernels(sim, device):
    """A kernel is stalled, and the host already has its result's shape."""
    with sim.stalled():
        a = torch.ones(3, device=device)
        b = a.mul(2).view(1, 3)
        event = sim.current_stream().record_event()
        assert b.shape == (1, 3)
        assert not event.query()
    event.synchronize()
    assert event.query()
    assert b.tolist() == [[2, 2, 2]]


def test_a_stalled_stream_does_not_hold_another(sim, device, side):
    """Only dependent streams wait."""
    with sim.stalled():
        with sim.stream(side):
            a = torch.ones(3, device=device).mul(2)
        side.synchronize()
        event = sim.current_stream().record_event()
    assert event.query() or event.synchronize() is None
    assert a.tolist() == [2, 2, 2]


def test_a_fault_shows_when_the_host_waits_and_once(sim, device):
    """Long after the failed operation was queued; its result has no values."""
    sim.fail_later("mul", after=2)
    a = torch.ones(3, device=device)
    a.mul(1)
    b = a.mul(1)
    with pytest.raises(RuntimeError, match=r"mul.*: a fault was asked for"):
        sim.synchronize()
    assert torch.isnan(b).all()
    sim.synchronize()


def test_a_copy_can_fail_late(sim, device):
    """Its target is unchanged."""
    a, host = torch.ones(3, device=device), torch.zeros(3, pin_memory=True)
    sim.fail_later("copy to host")
    host.copy_(a, non_blocking=True)
    with pytest.raises(RuntimeError, match="copy to host: a fault"):
        sim.synchronize()
    assert host.tolist() == [0, 0, 0]


def test_in_virtual_time_a_fault_is_told_when_the_host_is_there(sim, device, side):
    """Not when a thread reaches it, so equal ranks get it at the same place."""
    a, host = torch.ones(3, device=device), torch.zeros(3, pin_memory=True)
    sim.synchronize()
    sim.simulate(kernel_us=10, copy_us=500, virtual=True)
    sim.fail_later("copy to host")
    side.wait_stream(sim.current_stream())
    with sim.stream(side):
        host.copy_(a, non_blocking=True)
    a.mul(2)
    event = sim.current_stream().record_event()
    time.sleep(0.05)  # long enough for the copy's thread
    event.synchronize()
    with pytest.raises(RuntimeError, match="copy to host: a fault"):
        side.synchronize()
    sim.synchronize()


def test_virtual_time_is_made_of_the_costs_alone(sim, device, side):
    """Two kernels of 10 us next to a copy of 15, then one that needs both: 30 us."""
    a, host = torch.ones(3, device=device), torch.ones(3, pin_memory=True)
    sim.synchronize()
    sim.simulate(kernel_us=10, copy_us=15, virtual=True, log=True)
    side.wait_stream(sim.current_stream())
    begin = sim.Event(enable_timing=True)
    end = sim.Event(enable_timing=True)
    begin.record()
    with sim.stream(side):
        b = torch.empty_like(a)
        b.copy_(host, non_blocking=True)
    c = a.mul(2).mul(2)
    sim.current_stream().wait_stream(side)
    c = c + b
    end.record()
    end.synchronize()
    assert begin.elapsed_time(end) == pytest.approx(0.030)
    assert c.tolist() == [5, 5, 5]
    rows = {row.name: row for row in sim.timeline()}
    assert rows["copy to device"].end - rows["copy to device"].start == pytest.approx(15)
    assert rows["add.out"].start == pytest.approx(rows["mul.out"].end)
    del b


def test_in_virtual_time_an_event_is_done_when_the_host_is_that_late(sim, device):
    """Independent of the machine; with `host_us=0` the host is never late."""
    a = torch.ones(3, device=device)
    sim.synchronize()
    sim.simulate(kernel_us=100, virtual=True)
    a.add_(1)
    early = sim.current_stream().record_event()
    assert not early.query()
    sim.simulate(kernel_us=1, host_us=60, virtual=True)
    a.add_(1)
    assert not early.query()
    a.add_(1)
    assert early.query()


def test_jitter_is_the_same_for_the_same_program(sim, device):
    """Durations vary between operations; their mean does not change."""
    sim.simulate(kernel_us=100, virtual=True, jitter=True, log=True)
    a = torch.ones(3, device=device)
    for _ in range(50):
        a.add_(1)
    sim.synchronize()
    times = [row.end - row.start for row in sim.timeline() if row.name.startswith("add")]
    assert len({round(t, 6) for t in times}) > 25
    assert 50 < sum(times) / len(times) < 150


def test_a_full_queue_holds_the_host(sim, device):
    """So the host's lead is limited."""
    sim.simulate(queue_limit=4)
    a = torch.ones(3, device=device)
    reached = []

    def go():
        for step in range(20):
            a.add_(1)
            reached.append(step)

    thread = threading.Thread(target=go)
    with sim.stalled():
        thread.start()
        thread.join(0.5)
        held_at = len(reached)
    thread.join(30)
    assert held_at < 6
    assert len(reached) == 20


def test_streams_come_from_a_pool_and_belong_to_a_device(sim):
    """An event belongs to one device."""
    ids = {sim.Stream("simdev:1").stream_id for _ in range(40)}
    assert len(ids) == 32
    event = sim.current_stream("simdev:0").record_event()
    with pytest.raises(RuntimeError, match="an event of device 0"):
        event.record(sim.current_stream("simdev:1"))


def test_a_stream_is_current_in_its_thread_alone(sim, side):
    """As for every device in torch."""
    seen = []
    with sim.stream(side):
        thread = threading.Thread(target=lambda: seen.append(sim.current_stream()))
        thread.start()
        thread.join(30)
        assert sim.current_stream() == side
    assert seen[0] != side
    assert sim.current_stream() != side


@pytest.mark.parametrize("host_us", [0, 5])
def test_threads_may_ask_for_events_while_others_let_go_of_tensors(sim, device, side, host_us):
    """A query waits for a stream's thread, which may need a lock of the querying thread."""
    sim.simulate(virtual=True, kernel_us=3, copy_us=10, host_us=host_us)
    ended = []

    def work(stream):
        with sim.stream(stream):
            kept = []
            for _ in range(200):
                a = torch.ones(64, device=device)
                host = torch.empty(64, pin_memory=True)
                host.copy_(a, non_blocking=True)
                a.record_stream(stream)
                kept.append(stream.record_event())
                kept = [event for event in kept if not event.query()]
        ended.append(stream)

    streams = [side, sim.Stream(device)]
    threads = [threading.Thread(target=work, args=(each,), daemon=True) for each in streams]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(ended) == 2
