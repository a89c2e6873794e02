"""Forward: names, exceptions, threads and moved modules that torch 2.13 gets wrong."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from torchparts_conformance import requirement
from torchparts_conformance.cases.mod_tracker._models import (
    MLP,
    backward_of,
    events_of,
    leaf,
    linear,
    names_of,
    step,
)


@requirement(
    "MT-105",
    "Two roots of the same class MUST have different names.",
    rationale="reproduced on torch 2.13: both have the name of their class",
)
def test_roots_of_one_class(part, device):
    """Two roots have two names."""
    first, second = linear(device), linear(device)
    with part.ModTracker() as tracker:
        second(first(leaf(device)))
    assert tracker.get_known_fqn(first) != tracker.get_known_fqn(second)


class Fails(nn.Module):
    """Raises once, after a layer ran."""

    def __init__(self, device, error):
        super().__init__()
        self.a, self.error = linear(device), error

    def forward(self, x):
        """Run the layers."""
        y, error, self.error = self.a(x), self.error, None
        if error is not None:
            raise error
        return y


@requirement(
    "MT-111",
    'An exception in forward MUST leave `parents` as {"Global"}, and the next forward and '
    "backward MUST have each event once.",
    rationale="reproduced on torch 2.13: hooks of the failed forward fire as additional exits",
)
def test_exception_in_forward(part, device):
    """After a failed forward, the next step has each event once."""
    model, x = nn.Sequential(Fails(device, ValueError("once"))), leaf(device)
    tracker = part.ModTracker()
    events = events_of(tracker)
    with tracker:
        with pytest.raises(ValueError, match="once"):
            model(x)
        assert tracker.parents == {"Global"}
        step(model, x)
    assert set(Counter(backward_of(events)).values()) == {1}


@requirement(
    "MT-114",
    "Operations in a module's own hooks MUST be attributed to that module.",
    rationale="pytorch#130995; reproduced on torch 2.13: attributed to the parent",
)
def test_own_hooks_of_a_module(part, device):
    """A forward hook of the module runs inside it."""
    model, seen = nn.Sequential(linear(device)), []
    with part.ModTracker() as tracker:
        model[0].register_forward_hook(lambda *_: seen.append(frozenset(tracker.parents)))
        model(leaf(device))
    assert seen == [names_of("Sequential", "Sequential.0")]


@requirement(
    "MT-115",
    "Two threads MUST NOT see each other's modules.",
    rationale="reproduced on torch 2.13: one shared set, and RuntimeErrors raised into user code",
)
def test_threads(part, device):
    """Two models run at the same time."""
    meet, seen = threading.Barrier(2, timeout=20), {}

    class Waits(nn.Module):
        def __init__(self, number):
            super().__init__()
            self.number = number

        def forward(self, x):
            meet.wait()
            seen[self.number] = frozenset(tracker.parents)
            meet.wait()
            return x

    class A(nn.Sequential):
        pass

    class B(nn.Sequential):
        pass

    with part.ModTracker() as tracker:
        x = torch.ones(1, device=device)
        threads = [
            threading.Thread(target=model, args=(x,)) for model in (A(Waits(0)), B(Waits(1)))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert seen == {0: names_of("A", "A.0"), 1: names_of("B", "B.0")}


class AllEqual(nn.Linear):
    """Equal to everything, and unhashable."""

    def __eq__(self, other):
        return True

    __hash__ = None


@requirement(
    "MT-122",
    "Modules MUST be distinguished by identity, also if `__eq__` always returns True or the "
    "module is unhashable.",
    rationale=(
        "reproduced on torch 2.13: one module is reported as the other; TypeError in user code"
    ),
)
def test_identity_of_modules(part, device):
    """Two modules have two names, and nothing raises."""
    model, seen = nn.Sequential(*(AllEqual(4, 4, device=device) for _ in "ab")), []
    for module in model:
        module.register_forward_pre_hook(lambda *_: seen.append(frozenset(tracker.parents)))
    with part.ModTracker() as tracker:
        model(leaf(device))
    assert seen == [names_of("Sequential", f"Sequential.{index}") for index in range(2)]


@requirement(
    "MT-124",
    "A compiled model SHOULD be one module under the user's name, with its forward and backward "
    "events.",
    rationale="reproduced on torch 2.13: no events at all",
)
def test_compiled_model(part, device):
    """One module with the user's name."""
    torch.compiler.reset()
    run = torch.compile(MLP(device), backend="eager")
    x = leaf(device)
    run(x)
    tracker = part.ModTracker()
    events = events_of(tracker)
    with tracker:
        step(run, x)
    torch.compiler.reset()
    assert events == ["+fw MLP", "-fw MLP", "+bw MLP", "-bw MLP"]


@requirement(
    "MT-132",
    "A model SHOULD have the same events under FakeTensorMode.",
    rationale="memory and cost models run there",
)
def test_fake_tensors(part, device):
    """The same events with and without data."""

    def run():
        tracker = part.ModTracker()
        events = events_of(tracker)
        with tracker:
            step(MLP(device), leaf(device))
        return events

    with FakeTensorMode():
        fake = run()
    assert len(fake) == 12
    assert fake == run()
