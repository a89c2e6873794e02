"""Scenarios in which a package must wait; each fails if the wait is missing.

Time is virtual and the host is as far ahead as possible, so nothing has run on the device before
something waits for it. Only public functions are used. The tests with two ranks are in
test_sharded.py and test_sharded_calls.py.
"""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import flat_param
import sac_policies
from ckpt_wrap import OffloadError, offload_
from mod_tracker import OptionError, profile_time

ZERO, ONE = torch.device("simdev", 0), torch.device("simdev", 1)
AHEAD = {"virtual": True, "kernel_us": 100, "copy_us": 50}
SLOW = {"virtual": True, "kernel_us": 100, "copy_us": 5000}
WIDTH, ROWS = 64, 128


class Block(nn.Module):
    """Two matmuls with an activation in between."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(nn.functional.gelu(self.up(x)))


class Region(nn.Module):
    """A block whose matmuls and activations sac-policies offloads."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        policy = sac_policies.offload("aten.addmm", "aten.gelu")
        return sac_policies.checkpoint(self.block, x, policy=policy)


WAYS = {"ckpt-wrap": offload_, "sac-policies": Region}
both_packages = pytest.mark.parametrize("way", WAYS.values(), ids=list(WAYS))
any_copies = pytest.mark.parametrize("costs", [AHEAD, SLOW], ids=["quick copies", "slow copies"])


def stack(count=4, where=ZERO, way=None):
    """Return some blocks on a device, with the same weights each time."""
    torch.manual_seed(0)
    blocks = [Block().to(where) for _ in range(count)]
    return nn.Sequential(*(way(block) if way else block for block in blocks))


def batch(where=ZERO):
    """Return a batch that requires a gradient."""
    return torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH).to(where).requires_grad_()


def gradients(sim, step, models, x, costs):
    """Return gradients of models and input after a step, on the host; races fail."""
    sim.synchronize_all()
    sim.simulate(**costs)
    step(*models, x)
    assert sim.races() == []
    return [x.grad.cpu(), *(p.grad.cpu() for model in models for p in model.parameters())]


def assert_plain(sim, step, way, costs, *, where=(ZERO,), given=ZERO):
    """Assert that a step with all blocks changed has bit-identical gradients."""
    plain, changed = (
        gradients(sim, step, [stack(4, each, how) for each in where], batch(given), costs)
        for how in (None, way)
    )
    assert all(map(torch.equal, plain, changed))


def one_stream(model, x):
    """Forward and backward, twice."""
    for _ in range(2):
        model(x).square().sum().backward()


@both_packages
@any_copies
def test_copies_wait_for_the_stream_that_computes(sim, way, costs):
    """A copy out waits for the value, a copy in for its memory, the reader for the copy in."""
    assert_plain(sim, one_stream, way, costs)


def two_streams(model, x):
    """The second half of a model is on another stream, so backward reads on both."""
    main, side = torch.accelerator.current_stream(ZERO), torch.Stream(ZERO)
    h = model[:2](x)
    side.wait_stream(main)
    h.record_stream(side)
    with side:
        z = model[2:](h)
    main.wait_stream(side)
    z.record_stream(main)
    z.square().sum().backward()
    main.wait_stream(side)


@both_packages
@any_copies
def test_a_value_is_ready_on_the_stream_that_reads_it(sim, way, costs):
    """A prefetched value is for a stream other than the current one."""
    assert_plain(sim, two_streams, way, costs)


def test_memory_of_another_stream_is_kept_until_it_is_copied(sim):
    """Only the graph holds a tensor from another stream, so `record_stream` is needed."""
    main, side = torch.accelerator.current_stream(ZERO), torch.Stream(ZERO)
    model = stack(3, way=offload_)
    sim.simulate(**SLOW)
    x = batch()
    h = x * 2
    side.wait_stream(main)
    with side:
        h = model(h)
    torch.zeros(ROWS, WIDTH, device=ZERO)  # reuses the memory of x * 2 if it is free
    main.wait_stream(side)
    h.sum().backward()
    main.wait_stream(side)
    assert sim.races() == []


def saved_values(loss):
    """Return sums of all values that a graph's nodes saved, read on the current stream."""
    sums, nodes = [], [loss.grad_fn]
    for node in nodes:
        nodes += [before for before, _ in node.next_functions if before is not None]
        names = [name for name in dir(node) if name.startswith("_saved_")]
        saved = [value for name in names if torch.is_tensor(value := getattr(node, name))]
        sums += [value.double().sum() for value in saved]
    return torch.stack(sums)


@both_packages
@any_copies
def test_a_value_is_ready_whichever_device_is_current(sim, way, costs):
    """Device 0 is current while values of device 1 are read."""
    found = []
    for how in (None, way):
        loss = stack(2, ONE, how)(batch(ONE)).square().sum()
        sim.synchronize_all()
        assert torch.accelerator.current_device_index() == 0
        sim.simulate(**costs)
        found.append(saved_values(loss).cpu())
        assert sim.races() == []
    assert torch.equal(*found)


@both_packages
@any_copies
def test_a_value_read_on_another_stream_is_not_freed_early(sim, way, costs):
    """The memory belongs to the main stream, which continues while the side stream reads."""
    main, side = torch.accelerator.current_stream(ZERO), torch.Stream(ZERO)
    found = []
    for how in (None, way):
        loss = stack(2, way=how)(batch()).square().sum()
        sim.synchronize_all()
        sim.simulate(**costs)
        side.wait_stream(main)
        with side:
            read = saved_values(loss)
        for _ in range(4):
            torch.zeros(ROWS, 4 * WIDTH, device=ZERO)  # reuses free memory of the main stream
        main.wait_stream(side)
        found.append(read.cpu())
        assert sim.races() == []
    assert torch.equal(*found)


def two_devices(first, second, x):
    """Two backward threads at the same time, one per device."""
    (first(x).square().sum() + second(x.to(ONE)).square().sum().to(ZERO)).backward()


@both_packages
@any_copies
def test_backward_threads_of_two_devices_do_not_meet(sim, way, costs):
    """Each device has separate copies, streams and pinned memory in flight."""
    assert_plain(sim, two_devices, way, costs, where=(ZERO, ONE))


@pytest.mark.parametrize("costs", [AHEAD, SLOW], ids=["quick copies", "slow copies"])
def test_pinned_memory_is_reused_after_its_last_copy(sim, costs):
    """Device 1 still reads it while device 0 requests pinned memory."""
    found = []
    for how in (None, offload_):
        first, second = stack(3, ZERO, how), stack(3, ONE, how)
        x, y = batch(ONE), batch(ZERO)
        loss = second(x).square().sum()
        sim.synchronize_all()
        sim.simulate(**costs)
        loss.backward()
        del loss
        first(y).square().sum().backward()
        assert sim.races() == []
        params = [*first.parameters(), *second.parameters()]
        found.append([each.grad.cpu() for each in (x, y, *params)])
    assert all(map(torch.equal, *found))


@both_packages
def test_a_dropped_graph_frees_memory_after_its_copies(sim, way):
    """Without backward, the memory may be reused only after the copies out."""
    model, x = stack(3, way=way), batch()
    sim.simulate(**SLOW)
    model(x)
    gc.collect()
    for _ in range(4):
        torch.zeros(ROWS, 4 * WIDTH, device=ZERO)
        torch.zeros(ROWS, WIDTH, device=ZERO)
    assert sim.races() == []


@both_packages
def test_copies_run_beside_the_computation(sim, way):
    """A copy has its own stream and pinned memory, so nothing waits for it."""
    layer = way(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()).to(ZERO))
    x = batch()
    for _ in range(2):  # the first step creates streams and buffers
        sim.synchronize_all()
        sim.simulate(virtual=True, kernel_us=100, copy_us=100_000)
        before = sim.host_us()
        loss = layer(x * 1).sum()
        torch.accelerator.current_stream(ZERO).synchronize()
        took = sim.host_us() - before
        sim.simulate()
        loss.backward()
    assert took < 200_000  # two copies; sac-policies waits for one


def peak(sim, way, costs):
    """Return the peak of reserved bytes in a second step, without the weights."""
    model = stack(12, way=way)
    for _ in range(2):
        x = batch()
        model.zero_grad()
        gc.collect()
        sim.synchronize_all()
        sim.empty_cache()
        before = sim.memory()["reserved"]
        sim.reset_peak_memory_stats()
        sim.simulate(**costs)
        model(x).square().sum().backward()
        sim.simulate()
        sim.synchronize_all()
        found = sim.memory()["reserved_peak"] - before
    return found


@both_packages
def test_memory_is_freed_however_far_ahead_the_host_is(sim, way):
    """The device waits for the oldest copy, so that its memory is reused."""
    assert peak(sim, way, AHEAD) < 0.75 * peak(sim, None, AHEAD)


@both_packages
def test_nothing_is_held_after_backward(sim, way):
    """Also if copies are slow and nothing is called afterwards."""
    model = stack(4, way=way)
    for costs in ({}, SLOW):
        x = batch()
        sim.simulate(**costs)
        model(x).square().sum().backward()
        sim.simulate()
        sim.synchronize_all()
        model.zero_grad()
        del x
        gc.collect()
        found = sim.memory()["allocated"]
        if not costs:
            first = found
    assert found <= first


@any_copies
def test_an_in_place_change_is_an_error_however_far_the_copy_is(sim, costs):
    """Also if the copy has finished."""
    model = stack(1, way=offload_)
    x = batch()
    sim.simulate(**costs)
    h = x * 1
    loss = model(h).sum()
    with torch.no_grad():
        h.add_(1)
    with pytest.raises(OffloadError, match="in place"):
        loss.backward()
    sim.races()  # the change races with the copy


@pytest.mark.parametrize("costs", [{"copy_us": 3000}, SLOW], ids=["late", "virtual"])
def test_pack_hooks_of_the_user_get_bytes_that_have_arrived(sim, costs):
    """The hook reads on the host at once."""

    def hooked(model, x):
        with saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            y = model(x)
        y.square().sum().backward()

    assert_plain(sim, hooked, Region, costs)


def test_device_time_is_read_after_the_device_is_done(sim):
    """The host waits for the device before it reads the times of events."""
    model, x = stack(2), batch()
    sim.simulate(virtual=True, kernel_us=2000)
    with profile_time(model, clock="device") as report:
        model(x)
    assert report["Sequential.0"].forward >= 3 * 2_000_000


def test_device_time_is_that_of_the_modules_device(sim):
    """Although device 0 is current."""
    model, y = nn.Bilinear(4, 4, 4).to(ONE), torch.ones(4, 4, device=ONE).requires_grad_()
    sim.simulate(virtual=True, kernel_us=2000)
    with profile_time(model, clock="device") as report:
        model(y, y).sum().backward()
    sim.simulate()
    assert report["Bilinear"].forward >= 2_000_000
    assert report["Bilinear"].backward >= 2_000_000


def test_device_time_of_two_devices_is_refused(sim):
    model = nn.Sequential(nn.Linear(4, 4).to(ZERO), nn.Linear(4, 4).to(ONE))
    with (
        pytest.raises(OptionError, match="simdev:0, simdev:1"),
        profile_time(model, clock="device"),
    ):
        pass


def trained(offloaded, sim, device):
    """Return parameters after three steps of AdamW, with its state on the host or not."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if offloaded:
        optimizer = flat_param.offload_optimizer(optimizer, bucket_numel=256 * 257)
    sim.synchronize_all()
    sim.simulate(virtual=True, kernel_us=100)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(4, 256, device=device)).square().sum().backward()
        optimizer.step()
    assert sim.races() == []
    return [each.detach().cpu() for each in model.parameters()]


def test_optimizer_state_moves_between_host_and_device_in_order(sim, device):
    """Written after the step has computed it, read before the next step uses it."""
    plain, offloaded = (trained(each, sim, device) for each in (False, True))
    assert all(map(torch.equal, plain, offloaded))
