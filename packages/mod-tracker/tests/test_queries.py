"""Questions to a tracker: what runs, in which phase, under which name."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import mod_tracker


def linear():
    """A 4 x 4 layer without bias: each product has 2 * rows * 16 operations."""
    return nn.Linear(4, 4, bias=False)


def leaf():
    """An input that requires a gradient."""
    return torch.randn(2, 4, requires_grad=True)


def step(model, *args, **kwargs):
    """One forward and backward."""
    model(*args, **kwargs).sum().backward()


class MLP(nn.Module):
    """Two layers with a relu between them."""

    def __init__(self):
        super().__init__()
        self.a, self.b = linear(), linear()

    def forward(self, x):
        """Compute."""
        return self.b(self.a(x).relu())


class Checkpointed(nn.Module):
    """A checkpointed MLP and a layer."""

    def __init__(self, *, use_reentrant):
        super().__init__()
        self.m, self.out = MLP(), linear()
        self.use_reentrant = use_reentrant

    def forward(self, x):
        """Compute."""
        return self.out(checkpoint(self.m, x, use_reentrant=self.use_reentrant))


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


def test_stack_and_current():
    """Ordered from the root; the innermost is the last."""
    tracker = mod_tracker.ModTracker()
    asked = Asked(lambda: (tracker.stack, tracker.current))
    with tracker:
        step(nn.Sequential(nn.Sequential(asked)), leaf())
    names = ("Sequential", "Sequential.0", "Sequential.0.0")
    assert asked.answers == [(names, names[-1])] * 2
    assert (tracker.stack, tracker.current) == ((), None)


def test_phase():
    """All four, with non-reentrant checkpointing."""
    tracker, model, phases = mod_tracker.ModTracker(), Checkpointed(use_reentrant=False), []
    model.m.a.register_forward_pre_hook(lambda *_: phases.append(tracker.phase))
    with tracker:
        phases.append(tracker.phase)
        y = model(leaf())
        y.register_hook(lambda _: phases.append(tracker.phase))
        y.sum().backward()
    assert phases == ["outside", "forward", "backward", "recompute"]


def test_call_index_and_iteration():
    """Two iterations of a module that is called twice in each."""
    tracker = mod_tracker.ModTracker()
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
            step(model, leaf())
    forward = [(0, 0), (0, 1), (1, 2), (1, 3)]
    assert asked.answers == [*forward[:2], *forward[1::-1], *forward[2:], *forward[:1:-1]]


def test_subscriptions():
    """Two listeners, ended one by one."""
    tracker, heard, model = mod_tracker.ModTracker(), [], linear()
    first = tracker.subscribe(pre_forward=lambda call, args, kwargs: heard.append("first"))
    with tracker:
        with tracker.subscribe(pre_forward=lambda call, args, kwargs: heard.append("second")):
            model(leaf())
        model(leaf())
        first.remove()
        model(leaf())
    assert heard == ["first", "second", "first"]


def test_filters():
    """Each filter lets through what it says."""
    model = nn.Sequential(nn.Sequential(linear(), nn.ReLU()), linear())
    expected = {
        "include": ({"include": "0.*"}, ["Sequential.0.0", "Sequential.0.1"]),
        "exclude": ({"exclude": ("*.0", "Sequential")}, ["Sequential.0.1", "Sequential.1"]),
        "max_depth": ({"max_depth": 1}, ["Sequential"]),
        "types": ({"types": nn.ReLU}, ["Sequential.0.1"]),
    }
    tracker, heard = mod_tracker.ModTracker(), {name: [] for name in expected}
    for name, (filters, _) in expected.items():
        tracker.subscribe(
            pre_forward=lambda call, *_, name=name: heard[name].append(call.name), **filters
        )
    with tracker:
        model(leaf())
    assert heard == {name: names for name, (_, names) in expected.items()}


def test_in_module():
    """Patterns for names and for prefixes."""
    tracker = mod_tracker.ModTracker()
    asked = Asked(lambda: [tracker.in_module(p) for p in ("0.*", "Sequential.0", "1", "*.9")])
    with tracker:
        nn.Sequential(nn.Sequential(asked))(leaf())
    assert asked.answers == [[True, True, False, False]]


def test_module_of_a_name():
    """There and back, and None when it is gone."""
    tracker, model = mod_tracker.ModTracker(), MLP()
    with tracker:
        model(leaf())
    assert tracker.module("MLP.a") is model.a
    assert tracker.module("MLP.z") is None
    del model
    assert tracker.module("MLP.a") is None


def test_called_path():
    """A shared module: one name, two ways."""
    tracker = mod_tracker.ModTracker()
    asked = Asked(lambda: (tracker.current, tracker.called_as))

    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = asked
            self.seq = nn.Sequential(asked)

        def forward(self, x):
            return self.seq(self.a(x))

    with tracker, torch.no_grad():
        Shared()(leaf())
    assert asked.answers == [("Shared.a", "Shared.a"), ("Shared.a", "Shared.seq.0")]


def test_double_backward():
    """FLOPs of a gradient penalty: nothing is left outside of the modules."""
    model, x = nn.Sequential(linear(), nn.Tanh(), linear()), leaf()
    with mod_tracker.profile_flops() as report:
        grad = torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]
        grad.pow(2).sum().backward()
    assert report.outside.total == 0
    # Products of 64: layer 2 has one in the first backward, and one for its weight in the second;
    # layer 0 one, two for that product's factors, and two for those of its forward product.
    assert (report["Sequential.0"].backward, report["Sequential.2"].backward) == (5 * 64, 2 * 64)


def test_name_of_a_module_that_is_gone():
    """The name outlives the module."""
    tracker, heard = mod_tracker.ModTracker(), []
    tracker.subscribe(pre_backward=lambda call, grads: heard.append((call.name, call.module)))
    with tracker:
        model = linear()
        loss = model(leaf()).sum()
        del model
        loss.backward()
    assert heard == [("Linear", None)]
