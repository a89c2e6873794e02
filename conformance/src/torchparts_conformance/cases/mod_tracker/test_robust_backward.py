"""Backward: attribution and events that torch 2.13 gets wrong."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from torchparts_conformance import requirement
from torchparts_conformance.cases.mod_tracker._models import (
    MLP,
    Checkpointed,
    Note,
    backward_of,
    events_in,
    events_of,
    leaf,
    linear,
    names_of,
    products_of,
    step,
)

INNER = ("Checkpointed", "Checkpointed.m")


@requirement(
    "MT-101",
    "Recomputation MUST run inside the modules of the first forward and no others.",
    rationale=(
        "reproduced on torch 2.13: `parents` also has the module whose backward started the "
        "recomputation; FlopCounterMode reports 256 instead of 192"
    ),
)
def test_recompute_has_the_parents_of_the_forward(part, device):
    """The recomputed layer runs inside the same modules."""
    model, seen = Checkpointed(device, use_reentrant=False), []
    tracker = part.ModTracker()
    model.m.a.register_forward_pre_hook(
        lambda *_: seen.append((tracker.is_bw, frozenset(tracker.parents)))
    )
    with tracker:
        step(model, leaf(device))
    a = names_of(*INNER, "Checkpointed.m.a")
    assert [names - {"Checkpointed.m.a"} for _, names in seen] == [names_of(*INNER)] * 2
    products = products_of(
        part, lambda: step(Checkpointed(device, use_reentrant=False), leaf(device))
    )
    assert (False, a) in products and (True, a) in products


@requirement(
    "MT-102",
    "The backward of a graph that reentrant checkpointing built MUST be attributed to the modules"
    " whose recomputation built it.",
    rationale="reproduced on torch 2.13: inner modules are never entered in backward",
)
def test_reentrant_backward_is_attributed(part, device):
    """Two products for each inner layer in backward, and one in its recompute."""
    model = Checkpointed(device, use_reentrant=True)
    products = products_of(part, lambda: step(model, leaf(device)))
    counts = Counter(names for backward, names in products if backward)
    assert counts[names_of(*INNER, "Checkpointed.m.a")] == 3
    assert counts[names_of(*INNER, "Checkpointed.m.b")] == 3


@requirement(
    "MT-103",
    "With reentrant checkpointing every module MUST be entered in backward before it is left, and"
    " as often as it is left.",
    rationale="reproduced on torch 2.13: modules are left without having been entered",
)
def test_reentrant_events_are_paired(part, device):
    """Each exit has an entry before it."""
    events = events_in(part, lambda: step(Checkpointed(device, use_reentrant=True), leaf(device)))
    _assert_paired(backward_of(events))


def _assert_paired(events):
    open_now = Counter()
    for event in events:
        open_now[event[4:]] += 1 if event[0] == "+" else -1
        assert open_now[event[4:]] >= 0, f"{event} without an entry"
    assert not +open_now, f"never left: {+open_now}"


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        """Run the layers."""
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("in backward")


class FailsInBackward(nn.Module):
    """Raises when its gradient is computed."""

    def forward(self, x):
        """Run the layers."""
        return _Fails.apply(x)


@requirement(
    "MT-113",
    'An exception in backward MUST leave `parents` as {"Global"}.',
    rationale="reproduced on torch 2.13: the names are never removed",
)
def test_exception_in_backward(part, device):
    """No module is running afterwards."""
    model = nn.Sequential(linear(device), FailsInBackward(), linear(device))
    with part.ModTracker() as tracker:
        with pytest.raises(ValueError, match="in backward"):
            step(model, leaf(device))
        assert tracker.parents == {"Global"}


@requirement(
    "MT-117",
    "`torch.autograd.grad` for a leaf that is a module's input MUST work while hooks are "
    "registered.",
    rationale="pytorch#131753",
)
def test_grad_of_a_leaf_input(part, device):
    """torch.autograd.grad for the input gives the same result as without a tracker."""
    model, x = MLP(device), leaf(device)
    expected = torch.autograd.grad(model(x).sum(), x)[0]
    tracker, found = part.ModTracker(), []
    events_of(tracker)
    with tracker:
        found.append(torch.autograd.grad(model(x).sum(), x)[0])
    assert torch.equal(found[0], expected)


@requirement(
    "MT-118",
    "A second backward through a retained graph MUST have the same events as the first.",
    rationale=(
        "reproduced on torch 2.13: modules whose inputs require no gradient are left only the "
        "first time"
    ),
)
def test_second_backward(part, device):
    """The same events again."""
    tracker, model = part.ModTracker(), nn.Sequential(linear(device))
    events = events_of(tracker)
    with tracker:
        loss = model(torch.randn(2, 4, device=device)).sum()
        events.clear()
        loss.backward(retain_graph=True)
        first = list(events)
        loss.backward()
    assert len(first) == 4
    assert events == first * 2


@requirement(
    "MT-119",
    "In a backward for the gradient of one parameter, every module that is entered MUST be left.",
    rationale="reproduced on torch 2.13: a module is entered and never left",
)
def test_gradient_of_one_parameter(part, device):
    """Every entered module is left."""
    model = MLP(device)
    x = leaf(device)
    events = events_in(part, lambda: torch.autograd.grad(model(x).sum(), [model.b.weight]))
    assert backward_of(events)
    _assert_paired(backward_of(events))


@requirement(
    "MT-120",
    "Forwards without gradients MUST NOT cause events in a later backward.",
    rationale="reproduced on torch 2.13: 1,000 forwards of 10 layers fire 11,000 bogus events",
)
def test_inference_leaves_no_events(part, device):
    """A hundred forwards without gradients add no event to the next backward."""
    model, x = MLP(device), torch.randn(2, 4, device=device)

    def run():
        with torch.no_grad():
            for _ in range(100):
                model(x)
        step(model, x)

    counts = Counter(backward_of(events_in(part, run)))
    assert set(counts.values()) == {1}


@requirement(
    "MT-121",
    "No hook MUST remain on a tensor that outlives the graph.",
    rationale="reproduced on torch 2.13: 2,000 hooks on an input used in 1,000 forwards",
)
def test_no_hook_stays_on_tensors(part, device):
    """The input has no hook after the graphs are freed."""
    model, x = MLP(device), leaf(device)

    def run():
        for _ in range(10):
            model(x)

    events_in(part, run)
    assert not x._backward_hooks


@requirement(
    "MT-133",
    "A backward that runs after the tracker was left MUST still be attributed.",
    rationale="the graph outlives the block",
)
def test_backward_after_the_block(part, device):
    """The graph outlives the block and is still attributed."""
    tracker, note = part.ModTracker(), Note()
    note.tracker = tracker
    with tracker:
        y = nn.Sequential(note)(leaf(device))
    y.sum().backward()
    assert note.backwards == [(names_of("Sequential", "Sequential.0"), True)]


@requirement(
    "MT-131",
    "Results and gradients MUST be bit-identical with and without the tracker.",
    rationale="a tracker only observes",
)
def test_gradients_are_bitwise_equal(part, device):
    """With four hooks and without a tracker: bit-identical."""
    model, x = Checkpointed(device, use_reentrant=False), leaf(device)
    leaves = [x, *model.parameters()]

    def run():
        for tensor in leaves:
            tensor.grad = None
        output = model(x)
        output.sum().backward()
        return [output, *(tensor.grad.clone() for tensor in leaves)]

    expected = run()
    tracker, found = part.ModTracker(), []
    events_of(tracker)
    with tracker:
        found = run()
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
