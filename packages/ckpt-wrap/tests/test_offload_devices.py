"""Offload on an accelerator: synchronization with one or two streams, devices and threads.

Every test runs on any accelerator. The simulated one also reports races; it has a virtual clock
and runs queued work only when the host waits for it.
"""

from __future__ import annotations

import copy
import gc
import threading
import time

import pytest
import torch

from ckpt_wrap import (
    OffloadError,
    _host_tier,
    _offload_scheduler,
    checkpoint_,
    offload_,
    offload_stats,
)
from ckpt_wrap._options import OffloadOptions

from ._devices import (
    FAR_AHEAD,
    ON_AN_ACCELERATOR,
    SIM,
    SLOW_COPIES,
    TWO,
    Block,
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


@pytest.mark.parametrize("costs", [{}, FAR_AHEAD, SLOW_COPIES], ids=["quick", "ahead", "slow"])
@pytest.mark.parametrize("inflight_bytes", [None, 0])
def test_gradients_are_the_plain_ones(costs, inflight_bytes, monkeypatch):
    """Gradients of several steps on one stream."""
    if inflight_bytes is not None:
        monkeypatch.setattr(_offload_scheduler, "INFLIGHT_BYTES", inflight_bytes)
    plain = blocks(4, device())
    moved = offloaded(plain)
    results = []
    for model in (plain, moved):
        x = given(device())
        simulate(**costs)
        for _ in range(3):
            model(x).square().sum().backward()
        results.append(found([model], [x]))
    assert same(*results)


@pytest.mark.parametrize("costs", [{}, FAR_AHEAD, SLOW_COPIES], ids=["quick", "ahead", "slow"])
def test_checkpoints_inside_offload_give_the_plain_gradients(costs):
    """Only the inputs are offloaded."""
    plain = blocks(4, device())
    moved = copy.deepcopy(plain)
    for block in moved:
        offload_(checkpoint_(block))
    results = []
    for model in (plain, moved):
        x = given(device())
        simulate(**costs)
        model(x).square().sum().backward()
        results.append(found([model], [x]))
    assert same(*results)


@pytest.mark.parametrize("costs", [FAR_AHEAD, SLOW_COPIES], ids=["ahead", "slow"])
def test_a_later_part_may_run_on_another_stream(costs):
    """Prefetched memory belongs to the stream that will read it, not to the current stream."""
    plain = blocks(6, device())
    moved = offloaded(plain)
    results = []
    for model in (plain, moved):
        x, side = given(device()), torch.Stream(device())
        main = torch.accelerator.current_stream(device())
        simulate(**costs)
        h = model[:3](x)
        side.wait_stream(main)
        h.record_stream(side)
        with side:
            z = model[3:](h)
        main.wait_stream(side)
        z.record_stream(main)
        z.square().sum().backward()
        main.wait_stream(side)
        results.append(found([model], [x]))
        del h, z
    assert same(*results)


def test_a_source_of_another_stream_is_told_to_the_allocator():
    """Only the graph holds the source, so its memory could be reused while the copy runs."""
    side = torch.Stream(device())
    main = torch.accelerator.current_stream(device())
    moved = offloaded(blocks(3, device()))
    simulate(**SLOW_COPIES)
    x = given(device())
    h = x * 2
    side.wait_stream(main)
    with side:
        h = moved[0](h)  # its input was produced on the other stream, and only the graph holds it
        h = moved[1](h)
        h = moved[2](h)
    torch.zeros(128, 64, device=device())
    main.wait_stream(side)
    h.sum().backward()
    main.wait_stream(side)


@TWO
@pytest.mark.parametrize("costs", [FAR_AHEAD, SLOW_COPIES], ids=["ahead", "slow"])
def test_host_memory_goes_from_one_device_to_another_after_its_last_use(costs):
    """Device 1 slowly reads its copies while device 0 allocates and writes host memory."""
    a, b = blocks(3, device(0), 1), blocks(3, device(1))
    results = []
    for first, second in ((a, b), (offloaded(a), offloaded(b))):
        x, y = given(device(1)), given(device(0))
        loss = second(x).square().sum()
        synchronize()
        simulate(**costs)
        loss.backward()
        del loss
        first(y).square().sum().backward()
        results.append(found([first, second], [x, y]))
    assert same(*results)


@TWO
@pytest.mark.parametrize("costs", [FAR_AHEAD, SLOW_COPIES], ids=["ahead", "slow"])
def test_a_model_on_two_devices(costs):
    """Each device has its own copies and copy order."""
    a, b = blocks(3, device(0), 1), blocks(3, device(1))
    results = []
    for first, second in ((a, b), (offloaded(a), offloaded(b))):
        x = given(device(0))
        simulate(**costs)
        for _ in range(2):
            second(first(x).to(device(1))).square().sum().backward()
        results.append(found([first, second], [x]))
    assert same(*results)


def saved_in(loss):
    """Sums of the saved tensors of the nodes behind a loss, as user code may read them."""
    sums, nodes = [], [loss.grad_fn]
    for node in nodes:
        nodes += [before for before, _ in node.next_functions if before is not None]
        names = [name for name in dir(node) if name.startswith("_saved_")]
        saved = [value for name in names if torch.is_tensor(value := getattr(node, name))]
        sums += [value.double().sum() for value in saved]
    return torch.stack(sums).cpu()


@TWO
@pytest.mark.parametrize("costs", [FAR_AHEAD, SLOW_COPIES], ids=["ahead", "slow"])
def test_whoever_reads_waits_whichever_device_is_current(costs, monkeypatch):
    """The main thread reads saved tensors of nodes on a device that is not its current one."""
    monkeypatch.setattr(_offload_scheduler, "INFLIGHT_BYTES", 0)
    plain = blocks(1, device(1))
    results = []
    for model in (plain, offloaded(plain)):
        loss = model(given(device(1))).square().sum()
        synchronize()
        assert torch.accelerator.current_device_index() == 0
        simulate(**costs)
        results.append(saved_in(loss))
    assert torch.equal(*results)


def slowly_done(monkeypatch):
    """Let other threads run whenever a copy's completion is queried."""
    real = _host_tier.StreamCopy.done

    def done(self):
        answer = real(self)
        time.sleep(0)
        return answer

    monkeypatch.setattr(_host_tier.StreamCopy, "done", done)


@TWO
def test_two_backward_threads_read_each_storage_once(monkeypatch):
    """Each device has a backward thread; neither affects the other's fetches and releases."""
    a, b = blocks(6, device(0), 1), blocks(6, device(1))
    results = []
    slowly_done(monkeypatch)
    for first, second in ((a, b), *((offloaded(a), offloaded(b)) for _ in range(3))):
        x = given(device(0))
        simulate(kernel_us=50, copy_us=200, jitter=True)
        loss = first(x).square().sum() + second(x.to(device(1))).square().sum().to(device(0))
        loss.backward()
        results.append(found([first, second], [x]))
        del loss
        if first is not a:
            stats = [offload_stats(block) for block in (*first, *second)]
            assert sum(s.copies_in for s in stats) <= sum(s.copies_out for s in stats)
            assert sum(s.bytes_away for s in stats) == 0
    assert all(same(results[0], result) for result in results[1:])
    order = _offload_scheduler.scheduler_for(OffloadOptions("offload_")).order
    assert not [entry for entry in order._leaving if entry.ref() is not None]


def test_two_threads_that_read_one_storage_fetch_it_once(monkeypatch):
    """Any thread may read the saved tensors of one forward."""
    monkeypatch.setattr(_offload_scheduler, "INFLIGHT_BYTES", 0)
    model = offload_(Block().to(device()))
    model(given(device()))
    y = model(given(device()))
    synchronize()
    gc.collect()
    kept = [o for o in gc.get_objects() if type(o).__name__ == "OffloadedStorage"]
    storages = [s for s in kept if s.source is None and s.stored is not None]
    assert storages
    real, calls = _host_tier.HostTier.copy_in, []

    def copy_in(self, out):
        calls.append(out)
        time.sleep(0.05)
        return real(self, out)

    monkeypatch.setattr(_host_tier.HostTier, "copy_in", copy_in)
    threads = [threading.Thread(target=storages[0].read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    del y, kept, storages
    calls.clear()


@pytest.mark.parametrize("costs", [{}, FAR_AHEAD], ids=["quick", "ahead"])
def test_a_change_after_saving_is_an_error_however_far_the_copy_is(costs):
    """As in plain torch, also after the source has been freed."""
    model = offload_(Block().to(device()))
    x = given(device())
    simulate(**costs)
    h = x * 1
    loss = model(h).sum()
    if not costs:
        synchronize()
        model(given(device()))
    with torch.no_grad():
        h.add_(1)
    with pytest.raises(OffloadError, match="was changed in place after it was saved"):
        loss.backward()
    if SIM is not None:
        SIM.races()  # the write races with the copy, which is why it is an error
