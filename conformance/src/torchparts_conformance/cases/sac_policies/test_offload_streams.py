"""Values that a policy offloads, on several streams, by several backward threads, host far ahead.

On the CPU nothing is moved, and all of it holds too; see `_devices`.
"""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from torchparts_conformance import requirement
from torchparts_conformance.cases._devices import (
    devices,
    lag,
    module_of,
    races_are_read,  # noqa: F401
    synchronize,
)

ROWS, WIDTH = 128, 64
POLICY = ("aten.addmm", "aten.gelu")


def _networks(count, where):
    """The same ones each time."""
    torch.manual_seed(0)
    layers = (
        (nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(count)
    )
    return [nn.Sequential(*each).to(where) for each in layers]


def _given(where, rows=ROWS):
    """An input whose gradient is wanted."""
    return torch.linspace(-1, 1, rows * WIDTH).view(rows, WIDTH).to(where).requires_grad_()


def _run(part, networks, h, policy):
    """Each network as a region of its own; None: no region."""
    for network in networks:
        if policy is None:
            h = network(h)
        else:
            h = part.checkpoint(network, h, policy=policy)
    return h


def _gradients(device, x, networks):
    """On the host, after all is done."""
    synchronize(device)
    return [t.grad.cpu() for t in (x, *(p for network in networks for p in network.parameters()))]


def _two_streams(part, networks, x, policy, swapped):
    """The second half of the regions on a stream beside the first half's."""
    first, second = networks[:2], networks[2:]
    if x.device.type == "cpu":
        return _run(part, second, _run(part, first, x, policy), policy).square().sum()
    main, side = torch.accelerator.current_stream(x.device), torch.Stream(x.device)
    if swapped:
        side.wait_stream(main)
        with side:
            h = _run(part, first, x, policy)
        main.wait_stream(side)
        h.record_stream(main)
        return _run(part, second, h, policy).square().sum()
    h = _run(part, first, x, policy)
    side.wait_stream(main)
    h.record_stream(side)
    with side:
        z = _run(part, second, h, policy)
    main.wait_stream(side)
    z.record_stream(main)
    return z.square().sum()


@requirement(
    "SP-206",
    level="MUST",
    text=(
        "With regions of one model on streams of their own and copies that are slow, offloaded "
        "values MUST give the gradients of no checkpointing, bitwise, also after graphs whose "
        "copies were under way were dropped."
    ),
    rationale="what is asked for ahead of its use has to belong to the stream that will use it",
    since="0.1.0",
    profile="budget",
)
@pytest.mark.parametrize("copy_us", [50, 5000], ids=["quick", "slow"])
@pytest.mark.parametrize("swapped", [False, True], ids=["later-part", "earlier-part"])
def test_offloaded_values_on_streams_of_their_own(part, device, copy_us, swapped):
    """Two steps, the second of which knows what its regions read."""
    policy = part.offload(*POLICY)
    found = []
    for each in (None, policy, policy):
        networks, x = _networks(4, device), _given(device)
        lag(device, copy_us=copy_us)
        loss = _two_streams(part, networks, x, each, swapped)
        loss.backward()
        del loss
        found.append(_gradients(device, x, networks))
    assert all(map(torch.equal, found[0], found[1]))
    assert all(map(torch.equal, found[0], found[2]))


@requirement("SP-206")
def test_graphs_that_are_dropped_with_their_values(part, device):
    """Their copies are still under way, and the memory is handed out again at once."""
    policy = part.offload(*POLICY)
    found = []
    for each in (None, policy):
        networks, x = _networks(2, device), _given(device)
        lag(device)
        for _ in range(3):
            _run(part, networks, _given(device), each)
            torch.zeros(ROWS, 4 * WIDTH, device=device)
        _run(part, networks, x, each).square().sum().backward()
        found.append(_gradients(device, x, networks))
    assert all(map(torch.equal, *found))


@requirement(
    "SP-207",
    level="MUST",
    text=(
        "Regions with offloaded values on several devices in one backward, which has a thread "
        "for each, MUST have the gradients of no checkpointing, bitwise, and MUST bring no "
        "value back twice."
    ),
    rationale="backward threads of two devices share what counts and orders the copies",
    since="0.1.0",
    profile="budget",
)
@pytest.mark.parametrize("virtual", [False, True], ids=["as-it-comes", "far-ahead"])
def test_offloaded_values_of_two_devices_in_one_backward(part, device, virtual):
    """Each device has a thread that runs backward."""
    first, second = devices(device)
    policy = part.offload(*POLICY)
    found = []
    for each in (None, policy, policy):
        here, there, x = _networks(4, first), _networks(4, second), _given(first)
        before = part.offload_stats()
        lag(device, kernel_us=50, copy_us=200, jitter=True, virtual=virtual)
        loss = _run(part, here, x, each).square().sum()
        loss = loss + _run(part, there, x.to(second), each).square().sum().to(first)
        loss.backward()
        del loss
        found.append(_gradients(device, x, [*here, *there]))
        after = part.offload_stats()
        assert after.copies_in - before.copies_in <= after.copies_out - before.copies_out
    assert all(map(torch.equal, found[0], found[1]))
    assert all(map(torch.equal, found[0], found[2]))


def _reserved(part, networks, device, policy):
    """Most bytes that a step, asked for at once, has the allocator reserve beyond the weights; and
    what is held after it."""
    module = module_of(device)

    def step(x):
        _run(part, networks, x, policy).sum().backward()

    def clean():
        synchronize(device)
        for network in networks:
            network.zero_grad()
        gc.collect()

    step(_given(device, 8 * ROWS))
    clean()
    module.empty_cache()
    x = _given(device, 8 * ROWS)
    lag(device, copy_us=50)
    before, held = module.memory_reserved(), module.memory_allocated()
    module.reset_peak_memory_stats()
    step(x)
    most = module.max_memory_reserved() - before
    x.grad = None
    clean()
    return most, module.memory_allocated() - held


@requirement(
    "SP-208",
    level="MUST",
    text=(
        "Where the host is far ahead of an accelerator, regions whose values are offloaded MUST"
        " reserve less than three quarters of the memory that the plain step's activations "
        "take, and MUST hold nothing after backward."
    ),
    rationale=(
        "`record_stream` holds memory until the host sees the work done: what is allocated "
        "falls and what is reserved does not"
    ),
    since="0.1.0",
    profile="budget",
    devices=("accelerator",),
)
def test_memory_of_offloaded_values_with_the_host_far_ahead(part, device):
    """Twelve regions; less than three quarters of the plain step's memory, and nothing is left."""
    policy = part.offload(*POLICY)
    networks = _networks(12, device)
    most, left = _reserved(part, networks, device, policy)
    assert most < 0.75 * _reserved(part, networks, device, None)[0]
    assert left == 0
