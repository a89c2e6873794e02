"""Backward: attribution and events where the source is wrong."""

from __future__ import annotations

import contextlib
import threading
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
    input_gradients_of,
    leaf,
    linear,
    names_of,
    products_of,
    step,
)

INNER = ("Checkpointed", "Checkpointed.m")


@requirement("MT-101")
def test_recompute_has_the_parents_of_the_forward(part, device):
    """The layer that runs again does so inside the same modules."""
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


@requirement("MT-102")
def test_reentrant_backward_is_attributed(part, device):
    """Two products for each inner layer in backward, and one in its recompute."""
    model = Checkpointed(device, use_reentrant=True)
    products = products_of(part, lambda: step(model, leaf(device)))
    counts = Counter(names for backward, names in products if backward)
    assert counts[names_of(*INNER, "Checkpointed.m.a")] == 3
    assert counts[names_of(*INNER, "Checkpointed.m.b")] == 3


@requirement("MT-103")
def test_reentrant_events_are_paired(part, device):
    """What is left was entered before."""
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
        """Compute."""
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("in backward")


class FailsInBackward(nn.Module):
    """Raises when its gradient is asked for."""

    def forward(self, x):
        """Compute."""
        return _Fails.apply(x)


@requirement("MT-113")
def test_exception_in_backward(part, device):
    """Nothing runs afterwards."""
    model = nn.Sequential(linear(device), FailsInBackward(), linear(device))
    with part.ModTracker() as tracker:
        with pytest.raises(ValueError, match="in backward"):
            step(model, leaf(device))
        assert tracker.parents == {"Global"}


@requirement("MT-117")
def test_grad_of_a_leaf_input(part, device):
    """torch.autograd.grad for the input gives what it gives without a tracker."""
    model, x = MLP(device), leaf(device)
    expected = torch.autograd.grad(model(x).sum(), x)[0]
    tracker, found = part.ModTracker(), []
    events_of(tracker)
    with tracker:
        found.append(torch.autograd.grad(model(x).sum(), x)[0])
    assert torch.equal(found[0], expected)


@requirement("MT-118")
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


@requirement("MT-119")
def test_gradient_of_one_parameter(part, device):
    """Entered means left."""
    model = MLP(device)
    x = leaf(device)
    events = events_in(part, lambda: torch.autograd.grad(model(x).sum(), [model.b.weight]))
    assert backward_of(events)
    _assert_paired(backward_of(events))


@requirement("MT-120")
def test_inference_leaves_no_events(part, device):
    """A hundred forwards without gradients add nothing to the next backward."""
    model, x = MLP(device), torch.randn(2, 4, device=device)

    def run():
        with torch.no_grad():
            for _ in range(100):
                model(x)
        step(model, x)

    counts = Counter(backward_of(events_in(part, run)))
    assert set(counts.values()) == {1}


@requirement("MT-121")
def test_no_hook_stays_on_tensors(part, device):
    """The input carries no hook after the graphs are gone."""
    model, x = MLP(device), leaf(device)

    def run():
        for _ in range(10):
            model(x)

    events_in(part, run)
    assert not x._backward_hooks


@requirement("MT-130")
def test_hook_that_raises_in_backward(part, device):
    """Whatever becomes of the exception, the tracker is clean afterwards."""
    tracker, model = part.ModTracker(), MLP(device)

    def bad(module, grads):
        raise ZeroDivisionError

    tracker.register_user_hooks(pre_bw_hook=bad)
    with tracker:
        with contextlib.suppress(ZeroDivisionError):
            step(model, leaf(device))
        assert tracker.parents == {"Global"}


@requirement("MT-133")
def test_backward_after_the_block(part, device):
    """The graph outlives the block, and so does its attribution."""
    tracker, note = part.ModTracker(), Note()
    note.tracker = tracker
    with tracker:
        y = nn.Sequential(note)(leaf(device))
    y.sum().backward()
    assert note.backwards == [(names_of("Sequential", "Sequential.0"), True)]


@requirement("MT-134")
def test_graph_from_before_the_block(part, device):
    """What was not seen is not guessed."""
    loss = MLP(device)(leaf(device)).sum()
    products = products_of(part, loss.backward)
    assert set(products) == {(True, names_of())}


@requirement("MT-131")
def test_gradients_are_bitwise_equal(part, device):
    """With four hooks or without a tracker: the same bits."""
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


@requirement("MT-138")
def test_gradient_between_two_modules(part, device):
    """The hook gets the gradient that the caller gets."""
    first, second = linear(device), nn.Tanh()
    tracker = part.ModTracker()
    given = input_gradients_of(tracker)
    with tracker:
        between = first(leaf(device))
        grad = torch.autograd.grad(second(between).sum(), between)[0]
    assert torch.equal(given["Tanh"][0], grad)


@requirement("MT-141")
def test_backward_in_a_thread_that_appeared_later(part, device):
    """It ran a module before, which made no node."""
    note, without_gradients, ended = Note(), torch.no_grad()(linear(device)), []
    note.tracker = tracker = part.ModTracker()

    def work():
        without_gradients(leaf(device))
        loss.backward()
        ended.append(True)

    with tracker:
        loss = nn.Sequential(note)(leaf(device)).sum()
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(timeout=60)
    assert ended
    assert note.backwards == [(names_of("Sequential", "Sequential.0"), True)]
