"""What the better interface answers."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
from torch import nn

from torchparts_conformance import requirement
from torchparts_conformance.adapters.inside_torch import dispatch_modes
from torchparts_conformance.cases.mod_tracker._models import (
    MLP,
    Checkpointed,
    leaf,
    linear,
    step,
)


class Asked(nn.Module):
    """Asks a question in forward and in backward."""

    def __init__(self, question):
        super().__init__()
        self.question, self.answers = question, []

    def forward(self, x):
        """Compute."""
        y = x * 2
        self.answers.append(self.question())
        if y.requires_grad:
            y.register_hook(lambda _: self.answers.append(self.question()))
        return y


@requirement(
    "MT-201",
    level="MUST",
    text="`stack` MUST give the running modules in order, and `current` the innermost one.",
    rationale="a question of the better interface",
    since="0.1.0",
    profile="queries",
)
def test_stack_and_current(part, device):
    """Ordered from the root; the innermost is the last."""
    tracker = part.ModTracker()
    asked = Asked(lambda: (tracker.stack, tracker.current))
    with tracker:
        step(nn.Sequential(nn.Sequential(asked)), leaf(device))
    names = ("Sequential", "Sequential.0", "Sequential.0.0")
    assert asked.answers == [(names, names[-1])] * 2
    assert (tracker.stack, tracker.current) == ((), None)


@requirement(
    "MT-202",
    level="MUST",
    text="`phase` MUST be outside, forward, recompute or backward, as it is.",
    rationale="a question of the better interface",
    since="0.1.0",
    profile="queries",
)
def test_phase(part, device):
    """All four, with non-reentrant checkpointing."""
    tracker, model, phases = part.ModTracker(), Checkpointed(device, use_reentrant=False), []
    model.m.a.register_forward_pre_hook(lambda *_: phases.append(tracker.phase))
    with tracker:
        phases.append(tracker.phase)
        y = model(leaf(device))
        y.register_hook(lambda _: phases.append(tracker.phase))
        y.sum().backward()
    assert phases == ["outside", "forward", "backward", "recompute"]


@requirement(
    "MT-203",
    level="MUST",
    text=(
        "`call_index` and `iteration` MUST count earlier calls of the path and of its root, and"
        " in backward be those of the forward."
    ),
    rationale="a question of the better interface",
    since="0.1.0",
    profile="queries",
)
def test_call_index_and_iteration(part, device):
    """Two iterations of a module that is called twice in each."""
    tracker = part.ModTracker()
    asked = Asked(lambda: (tracker.iteration, tracker.call_index))

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.asked = asked

        def forward(self, x):
            return self.asked(self.asked(x))

    model = Twice()
    with tracker:
        for _ in range(2):
            step(model, leaf(device))
    forward = [(0, 0), (0, 1), (1, 2), (1, 3)]
    assert asked.answers == [*forward[:2], *forward[1::-1], *forward[2:], *forward[:1:-1]]


@requirement(
    "MT-204",
    level="MUST",
    text=(
        "Several subscriptions MUST be independent, and each end with `remove()` or its `with` "
        "block."
    ),
    rationale="a question of the better interface",
    since="0.1.0",
    profile="queries",
)
def test_subscriptions(part, device):
    """Two listeners, ended one by one."""
    tracker, heard, model = part.ModTracker(), [], linear(device)
    first = tracker.subscribe(pre_forward=lambda call, args, kwargs: heard.append("first"))
    with tracker:
        with tracker.subscribe(pre_forward=lambda call, args, kwargs: heard.append("second")):
            model(leaf(device))
        model(leaf(device))
        first.remove()
        model(leaf(device))
    assert heard == ["first", "second", "first"]


@requirement(
    "MT-205",
    level="MUST",
    text="A subscription MUST be limited by include, exclude, max_depth and types.",
    rationale="a question of the better interface",
    since="0.1.0",
    profile="queries",
)
def test_filters(part, device):
    """Each filter lets through what it says."""
    model = nn.Sequential(nn.Sequential(linear(device), nn.ReLU()), linear(device))
    expected = {
        "include": ({"include": "0.*"}, ["Sequential.0.0", "Sequential.0.1"]),
        "exclude": ({"exclude": ("*.0", "Sequential")}, ["Sequential.0.1", "Sequential.1"]),
        "max_depth": ({"max_depth": 1}, ["Sequential"]),
        "types": ({"types": nn.ReLU}, ["Sequential.0.1"]),
    }
    tracker, heard = part.ModTracker(), {name: [] for name in expected}
    for name, (filters, _) in expected.items():
        tracker.subscribe(
            pre_forward=lambda call, *_, name=name: heard[name].append(call.name), **filters
        )
    with tracker:
        model(leaf(device))
    assert heard == {name: names for name, (_, names) in expected.items()}


@requirement(
    "MT-206",
    level="MUST",
    text="`in_module` MUST match names and state_dict prefixes.",
    rationale="a question of the better interface",
    since="0.1.0",
    profile="queries",
)
def test_in_module(part, device):
    """Patterns for names and for prefixes."""
    tracker = part.ModTracker()
    asked = Asked(lambda: [tracker.in_module(p) for p in ("0.*", "Sequential.0", "1", "*.9")])
    with tracker:
        nn.Sequential(nn.Sequential(asked))(leaf(device))
    assert asked.answers == [[True, True, False, False]]


@requirement(
    "MT-207",
    level="MUST",
    text="`module` MUST give the module with a name, and None after it is gone.",
    rationale="a question of the better interface",
    since="0.1.0",
    profile="queries",
)
def test_module_of_a_name(part, device):
    """There and back, and None when it is gone."""
    tracker, model = part.ModTracker(), MLP(device)
    with tracker:
        model(leaf(device))
    assert tracker.module("MLP.a") is model.a
    assert tracker.module("MLP.z") is None
    del model
    assert tracker.module("MLP.a") is None


@requirement(
    "MT-208",
    level="MUST",
    text="`called_as` MUST give the path by which a shared module was reached.",
    rationale="a question of the better interface",
    since="0.1.0",
    profile="queries",
)
def test_called_path(part, device):
    """A shared module: one name, two ways."""
    tracker = part.ModTracker()
    asked = Asked(lambda: (tracker.current, tracker.called_as))

    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = asked
            self.seq = nn.Sequential(asked)

        def forward(self, x):
            return self.seq(self.a(x))

    with tracker, torch.no_grad():
        Shared()(leaf(device))
    assert asked.answers == [("Shared.a", "Shared.a"), ("Shared.a", "Shared.seq.0")]


@requirement(
    "MT-209",
    level="MUST",
    text=(
        "The nodes that a first backward creates MUST be attributed in a second one to the "
        "module that made them."
    ),
    rationale="reproduced by FLOPs of a double backward",
    since="0.1.0",
    profile="queries",
)
def test_double_backward(part, device):
    """FLOPs of a gradient penalty: nothing is left outside of the modules."""
    model, x = nn.Sequential(linear(device), nn.Tanh(), linear(device)), leaf(device)
    with part.profile_flops() as report:
        grad = torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]
        grad.pow(2).sum().backward()
    assert report.outside.total == 0
    # Products of 64: layer 2 has one in the first backward, and one for its weight in the second;
    # layer 0 one, two for that product's factors, and two for those of its forward product.
    assert (report["Sequential.0"].backward, report["Sequential.2"].backward) == (5 * 64, 2 * 64)


@requirement(
    "MT-250",
    level="MUST",
    text=(
        "The nodes that a first backward creates in another thread, as the backward thread of a"
        " device is, MUST be attributed in a second one to the module that made them, whatever "
        "numbers both threads used."
    ),
    rationale="reproduced on a simulated accelerator: they were charged outside of modules",
    since="0.1.0",
    profile="queries",
)
@pytest.mark.parametrize("used", [0, 3, 50])
def test_double_backward_of_another_thread(part, device, used):
    """The first backward runs in a thread that made some nodes itself before.

    As autograd does for a device's thread, it gives the thread the modes of its caller.
    """
    model, x = nn.Sequential(linear(device), nn.Tanh(), linear(device)), leaf(device)
    loss, found, modes = None, [], []

    def first_backward():
        with contextlib.ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode)
            for _ in range(used):
                x.clone()
            found.append(torch.autograd.grad(loss, x, create_graph=True)[0])

    with part.profile_flops() as report:
        modes += dispatch_modes()
        loss = model(x).sum()
        thread = threading.Thread(target=first_backward)
        thread.start()
        thread.join()
        found[0].pow(2).sum().backward()
    assert report.outside.total == 0
    assert (report["Sequential.0"].backward, report["Sequential.2"].backward) == (5 * 64, 2 * 64)


@requirement(
    "MT-210",
    level="MUST",
    text="A call given to a subscriber MUST keep its name after the module is gone.",
    rationale="a question of the better interface",
    since="0.1.0",
    profile="queries",
)
def test_name_of_a_module_that_is_gone(part, device):
    """The name outlives the module."""
    tracker, heard = part.ModTracker(), []
    tracker.subscribe(pre_backward=lambda call, grads: heard.append((call.name, call.module)))
    with tracker:
        model = linear(device)
        loss = model(leaf(device)).sum()
        del model
        loss.backward()
    assert heard == [("Linear", None)]
