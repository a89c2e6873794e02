"""Offload on an accelerator: who waits for whom, on one stream, two, two devices and two threads.

Every test runs on whatever accelerator there is. On the simulated one, in virtual time where
nothing is done before the host waits for it, races are reported as well.
"""

from __future__ import annotations

import copy
import gc
import threading
import time

import pytest
import torch
from torch import nn

from ckpt_wrap import OffloadError, OffloadOptions, checkpoint_, offload_, offload_stats
from ckpt_wrap.offload import _host_tier
from ckpt_wrap.offload._offload_scheduler import scheduler_for

pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator"),
]
KIND = torch.accelerator.current_accelerator() or torch.device("cpu")
SIM = getattr(torch, "simdev", None)
SIMULATED = pytest.mark.skipif(SIM is None, reason="needs the simulated device")
TWO = pytest.mark.skipif(
    torch.accelerator.device_count() < 2, reason="needs two devices of one kind"
)
FAR_AHEAD = {"kernel_us": 100, "copy_us": 50, "virtual": True}
SLOW_COPIES = {"kernel_us": 100, "copy_us": 5000, "virtual": True}
MIB = 2**20


class Block(nn.Module):
    """Two products and what is between them."""

    def __init__(self, features: int = 64) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(features, 4 * features), nn.Linear(4 * features, features)

    def forward(self, x):
        return self.down(torch.nn.functional.gelu(self.up(x)))


def device(index: int = 0) -> torch.device:
    """One of the accelerators."""
    return torch.device(KIND.type, index)


def blocks(count: int, where: torch.device, seed: int = 0) -> nn.Sequential:
    """A chain of them."""
    torch.manual_seed(seed)
    return nn.Sequential(*[Block() for _ in range(count)]).to(where)


def offloaded(model: nn.Sequential, **options) -> nn.Sequential:
    """The same weights, each block offloaded."""
    twin = copy.deepcopy(model)
    for block in twin:
        offload_(block, **options)
    return twin


def given(where: torch.device, rows: int = 128) -> torch.Tensor:
    """An input, its gradient wanted."""
    return torch.linspace(-1, 1, rows * 64).view(rows, 64).to(where).requires_grad_()


def found(models, inputs) -> list[torch.Tensor]:
    """Gradients on the host, after everything is done."""
    synchronize()
    wanted = [*inputs, *(p for model in models for p in model.parameters())]
    return [t.grad.cpu() for t in wanted]


def synchronize() -> None:
    """Wait for every device."""
    for index in range(torch.accelerator.device_count()):
        torch.accelerator.synchronize(index)


def same(a, b) -> bool:
    """Bit for bit."""
    return len(a) == len(b) and all(map(torch.equal, a, b))


@pytest.fixture(autouse=True)
def _no_race():
    """Nothing is reported by the end of a test, where there is somebody who reports."""
    if SIM is not None:
        SIM.reset()
    yield
    synchronize()
    gc.collect()
    races = [] if SIM is None else SIM.races()
    if SIM is not None:
        SIM.reset()
    assert races == []


def simulate(**costs) -> None:
    """Set how long things take, where that can be set."""
    if SIM is not None:
        SIM.simulate(**costs)


@pytest.mark.parametrize("costs", [{}, FAR_AHEAD, SLOW_COPIES], ids=["quick", "ahead", "slow"])
@pytest.mark.parametrize("options", [{}, {"keep_last": 1}, {"max_inflight_bytes": 0}], ids=str)
def test_gradients_are_the_plain_ones(costs, options):
    """Of one stream, step after step."""
    plain = blocks(4, device())
    moved = offloaded(plain, **options)
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
    """Only the inputs are moved."""
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
    """What is fetched early belongs to the stream it will be read on, not to the current one."""
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
    """Nobody else holds it: the graph did, and the user counted on that."""
    side = torch.Stream(device())
    main = torch.accelerator.current_stream(device())
    moved = offloaded(blocks(3, device()))
    simulate(**SLOW_COPIES)
    x = given(device())
    h = x * 2
    side.wait_stream(main)
    with side:
        h = moved[0](h)  # its input was made on the other stream, and is held by the graph alone
        h = moved[1](h)
        h = moved[2](h)
    torch.zeros(128, 64, device=device())
    main.wait_stream(side)
    h.sum().backward()
    main.wait_stream(side)


def test_a_graph_that_is_dropped_lets_go_of_its_sources_in_order():
    """Their copies are still under way, and the memory is handed out again at once."""
    model = offloaded(blocks(3, device()))
    simulate(**SLOW_COPIES)
    for _ in range(3):
        y = model(given(device()))
        del y
        torch.zeros(128, 256, device=device())
    assert sum(offload_stats(block).bytes_away for block in model) == 0


def test_what_was_fetched_and_is_not_read_is_let_go_of_in_order():
    """The gradient of the later half alone: the call before was fetched for nothing."""
    model = offloaded(blocks(4, device()))
    simulate(**SLOW_COPIES)
    h = model[:2](given(device()))
    loss = model[2:](h).sum()
    torch.autograd.grad(loss, h)
    del loss, h
    torch.zeros(128, 256, device=device())


@TWO
@pytest.mark.parametrize("costs", [FAR_AHEAD, SLOW_COPIES], ids=["ahead", "slow"])
def test_host_memory_goes_from_one_device_to_another_after_its_last_use(costs):
    """Device 1 reads what it fetches, slowly, while device 0 takes host memory and writes to it."""
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
    """Each device has copies and an order of its own."""
    a, b = blocks(3, device(0), 1), blocks(3, device(1))
    results = []
    for first, second in ((a, b), (offloaded(a), offloaded(b))):
        x = given(device(0))
        simulate(**costs)
        for _ in range(2):
            second(first(x).to(device(1))).square().sum().backward()
        results.append(found([first, second], [x]))
    assert same(*results)


def slowly_done(monkeypatch):
    """Let other threads run where a copy is asked whether it is done."""
    real = _host_tier.StreamCopy.done

    def done(self):
        answer = real(self)
        time.sleep(0)
        return answer

    monkeypatch.setattr(_host_tier.StreamCopy, "done", done)


@TWO
def test_two_backward_threads_read_each_storage_once(monkeypatch):
    """Each device has a thread; neither disturbs what the other fetches or lets go of."""
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
    orders = scheduler_for(OffloadOptions()).orders.values()
    assert [order.leaving_bytes for order in orders] == [0] * len(orders)


def test_two_threads_that_read_one_storage_fetch_it_once(monkeypatch):
    """What one forward saved may be read by any threads."""
    model = offload_(Block().to(device()), max_inflight_bytes=0)
    model(given(device()))
    y = model(given(device()))
    synchronize()
    gc.collect()
    kept = [o for o in gc.get_objects() if type(o).__name__ == "OffloadedStorage"]
    storages = [s for s in kept if s.source is None and s.stored is not None]
    assert storages
    real, calls = _host_tier.StreamLink.copy_in, []

    def copy_in(self, out):
        calls.append(out)
        time.sleep(0.05)
        return real(self, out)

    monkeypatch.setattr(_host_tier.StreamLink, "copy_in", copy_in)
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
    """As in plain torch: not only while the source happens to be there."""
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
        SIM.races()  # that of the change with the copy, which is the reason for the error


def test_after_backward_nothing_is_held():
    """Whether or not anything is called later."""
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


def held_bytes(model, **costs) -> int:
    """Most bytes that the allocator had reserved in the second of two steps."""
    for _ in range(2):
        synchronize()
        gc.collect()
        torch.accelerator.empty_cache()
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
def test_memory_does_not_grow_with_how_far_the_host_is_ahead():
    """Twelve blocks: what is reserved is at most 0.45 of the plain model's."""
    plain = blocks(12, device())
    moved = offloaded(plain)
    ahead = held_bytes(moved, **FAR_AHEAD)
    del moved
    assert ahead <= 0.45 * held_bytes(plain, **FAR_AHEAD)


@SIMULATED
def test_copies_that_take_half_as_long_as_kernels_are_hidden():
    """A step of twelve blocks takes at most 1.03 of the plain model's, on the device's clock."""
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
    """The step is lost; the next one is right."""
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
