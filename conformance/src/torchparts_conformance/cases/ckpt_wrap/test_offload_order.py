"""Offload to the host: who waits for whom. On the CPU nothing moves, and all of it holds too.

See `_devices` for how a wait that is missing is seen.
"""

from __future__ import annotations

import copy
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

FEATURES, ROWS = 64, 128


class Block(nn.Module):
    """Two products and what is between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(FEATURES, 4 * FEATURES), nn.Linear(4 * FEATURES, FEATURES)

    def forward(self, x):
        """Run."""
        return self.down(nn.functional.gelu(self.up(x)))


def blocks(count, where):
    """A chain of them."""
    return nn.Sequential(*[Block() for _ in range(count)]).to(where)


def offloaded(part, model):
    """The same weights, each block offloaded to the host."""
    twin = copy.deepcopy(model)
    for block in twin:
        part.offload_(block)
    return twin


def given(where, rows=ROWS):
    """An input whose gradient is wanted."""
    return torch.linspace(-1, 1, rows * FEATURES).view(rows, -1).to(where).requires_grad_()


def gradients(kind, models, inputs):
    """On the host, after all is done."""
    synchronize(kind)
    wanted = [*inputs, *(p for model in models for p in model.parameters())]
    return [t.grad.cpu() for t in wanted]


@requirement(
    "CW-112",
    level="MUST",
    text=(
        "Models offloaded to the host on several devices, in turn or in one backward with a "
        "thread for each device, MUST have the plain gradients, and MUST bring no storage back "
        "twice."
    ),
    rationale=(
        "reproduced on a simulated accelerator: host memory went to another device while it was"
        " still read, and backward threads disturbed each other"
    ),
    since="0.1.0",
    profile="offload",
)
@pytest.mark.parametrize("turn", [1, -1], ids=["current-last", "current-first"])
def test_two_devices_one_after_the_other(part, device, turn):
    """What one model fetches is still being copied when the other's forward takes host memory."""
    first, second = devices(device)[::turn]
    a, b = blocks(3, first), blocks(3, second)
    results = []
    for one, two in ((a, b), (offloaded(part, a), offloaded(part, b))):
        x, y = given(second), given(first)
        loss = two(x).square().sum()
        synchronize(device)
        lag(device)
        loss.backward()
        del loss
        one(y).square().sum().backward()
        results.append(gradients(device, [one, two], [x, y]))
    assert all(map(torch.equal, *results))


@requirement("CW-112")
def test_two_devices_in_one_backward(part, device):
    """Each device has a thread that runs backward; nothing is fetched twice."""
    first, second = devices(device)
    a, b = blocks(6, first), blocks(6, second)
    results = []
    for one, two in ((a, b), (offloaded(part, a), offloaded(part, b))):
        x = given(first)
        lag(device, kernel_us=50, copy_us=200, jitter=True, virtual=False)
        loss = one(x).square().sum() + two(x.to(second)).square().sum().to(first)
        loss.backward()
        results.append(gradients(device, [one, two], [x]))
    assert all(map(torch.equal, *results))
    stats = [part.offload_stats(block) for block in (*one, *two)]
    assert sum(s.copies_in for s in stats) <= sum(s.copies_out for s in stats)


@requirement("CW-112")
def test_each_storage_comes_back_once(part, device):
    """All of them are away: the device came to rest, and there was a call after it."""
    model = offloaded(part, blocks(3, device))
    loss = model(given(device)).sum()
    synchronize(device)
    for block in model:
        block(given(device, 1))
    before = [part.offload_stats(block) for block in model]
    loss.backward()
    after = [part.offload_stats(block) for block in model]
    for one, other in zip(before, after, strict=True):
        assert other.bytes_in - one.bytes_in <= one.bytes_away


@requirement(
    "CW-113",
    level="MUST",
    text=(
        "A tensor that was changed in place after it was saved MUST be an error in backward, "
        "however far its copy to the host is."
    ),
    rationale="without offload autograd always raises; whether a copy was done decided it",
    since="0.1.0",
    profile="offload",
)
@pytest.mark.parametrize("is_copied", [False, True], ids=["early", "late"])
def test_a_change_after_saving_is_an_error(part, device, is_copied):
    """Whether the copy has not begun or has ended."""
    model = part.offload_(Block().to(device))
    x = given(device)
    lag(device)
    h = x * 1
    loss = model(h).sum()
    if is_copied:
        synchronize(device)
        model(given(device))
    with torch.no_grad():
        h.add_(1)
    with pytest.raises(RuntimeError, match=r"(?i)in.?place"):
        loss.backward()
    if hasattr(module_of(device), "races"):
        module_of(device).races()  # of the change with the copy: it is what the error is about


@requirement(
    "CW-114",
    level="MUST",
    text=(
        "With parts of a model on streams of their own and copies that are slow, offload to the"
        " host MUST give the plain gradients, also after graphs whose copies were under way "
        "were dropped."
    ),
    rationale=(
        "reproduced on a simulated accelerator: what was fetched ahead was used on a stream "
        "that its memory was not recorded for, and gradients were wrong in one run of eight"
    ),
    since="0.1.0",
    profile="offload",
)
@pytest.mark.parametrize("copy_us", [50, 5000], ids=["quick", "slow"])
def test_a_later_part_on_another_stream(part, device, copy_us):
    """What is fetched ahead of its use belongs to the stream that will use it."""
    plain = blocks(6, device)
    results = []
    for model in (plain, offloaded(part, plain)):
        x = given(device)
        lag(device, copy_us=copy_us)
        if device == "cpu":
            model(x).square().sum().backward()
        else:
            _on_two_streams(model, x, device)
        results.append(gradients(device, [model], [x]))
    assert all(map(torch.equal, *results))


def _on_two_streams(model, x, device):
    main = torch.accelerator.current_stream(torch.device(device, 0))
    side = torch.Stream(torch.device(device, 0))
    h = model[:3](x)
    side.wait_stream(main)
    h.record_stream(side)
    with side:
        z = model[3:](h)
    main.wait_stream(side)
    z.record_stream(main)
    z.square().sum().backward()
    main.wait_stream(side)


@requirement("CW-114")
def test_graphs_that_are_dropped(part, device):
    """Their copies are still under way, and the memory is handed out again at once."""
    plain = blocks(3, device)
    model = offloaded(part, plain)
    lag(device)
    for _ in range(3):
        model(given(device))
        torch.zeros(ROWS, 4 * FEATURES, device=device)
    results = []
    for each in (plain, model):
        x = given(device)
        each(x).square().sum().backward()
        results.append(gradients(device, [each], [x]))
    assert all(map(torch.equal, *results))


def reserved(model, device):
    """Most bytes that a step, asked for at once, has the allocator reserve beyond the weights."""
    module = module_of(device)
    model(given(device, 8 * ROWS)).sum().backward()
    synchronize(device)
    model.zero_grad()
    gc.collect()
    module.empty_cache()
    x = given(device, 8 * ROWS)
    lag(device, copy_us=50)
    before = module.memory_reserved()
    module.reset_peak_memory_stats()
    model(x).sum().backward()
    most = module.max_memory_reserved() - before
    synchronize(device)
    return most


@requirement(
    "CW-115",
    level="MUST",
    text=(
        "Where the host is far ahead of an accelerator, offload to the host MUST still reserve "
        "less than three quarters of the memory that the plain step's activations take."
    ),
    rationale=(
        "`record_stream` holds memory until the host sees the work done: what is allocated "
        "falls and what is reserved does not"
    ),
    since="0.1.0",
    profile="offload",
)
def test_memory_with_the_host_far_ahead(part, device):
    """Twelve blocks; of their activations less than three quarters of the plain step's memory."""
    if device == "cpu":
        return  # nothing leaves: there is nothing to measure
    plain = blocks(12, device)
    assert reserved(offloaded(part, plain), device) < 0.75 * reserved(plain, device)


@requirement(
    "CW-116",
    level="MUST",
    text=(
        "After backward, with the device at rest and without another call, no byte MUST count "
        "as away and no source MUST be held."
    ),
    rationale="7 MB of sources were held until the next call",
    since="0.1.0",
    profile="offload",
)
def test_nothing_is_held_after_backward(part, device):
    """With the device at rest, and without another call."""
    model = offloaded(part, blocks(4, device))
    lag(device)
    model(given(device)).sum().backward()
    synchronize(device)
    assert sum(part.offload_stats(block).bytes_away for block in model) == 0
    module = module_of(device)
    if module is not None:
        model.zero_grad()
        gc.collect()
        before = module.memory_allocated()
        model(given(device)).sum().backward()
        synchronize(device)
        assert sum(part.offload_stats(block).bytes_away for block in model) == 0
        model.zero_grad()
        gc.collect()
        assert module.memory_allocated() == before
