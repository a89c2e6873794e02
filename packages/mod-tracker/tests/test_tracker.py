"""Properties, subscriptions and limits of a tracker."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import nn

from mod_tracker import ModTracker


def step(model, x):
    """One forward and backward."""
    model(x).sum().backward()


def test_switches_report_every_change(mlp):
    """Entry and exit in forward, the reverse in backward, and outside at the end."""
    tracker, seen = ModTracker(), []
    tracker.subscribe(
        switched=lambda call, phase: seen.append((call.name if call else None, phase))
    )
    with tracker:
        step(mlp, torch.randn(2, 4))
    forward = ["MLP", "MLP.a", "MLP", "MLP.b", "MLP", None]
    assert [name for name, phase in seen if phase != "backward"] == [*forward, None]
    assert [name for name, phase in seen if phase == "backward"] == ["MLP.b", "MLP", "MLP.a"]
    assert all((phase == "outside") == (name is None) for name, phase in seen)


def test_switch_after_a_backward_inside_a_forward_is_the_forward(x):

    class Forces(nn.Module):
        def __init__(self):
            super().__init__()
            self.energy = nn.Linear(4, 1)

        def forward(self, x):
            return torch.autograd.grad(self.energy(x).sum(), x)[0]

    tracker, seen = ModTracker(), []
    tracker.subscribe(
        switched=lambda call, phase: seen.append((call.name if call else None, phase))
    )
    with tracker:
        Forces()(x)
    assert seen[-3:] == [
        ("Forces.energy", "backward"),
        ("Forces", "forward"),
        (None, "outside"),
    ]


def test_subscriptions_come_and_go_inside_the_block(mlp, x):
    """A subscription may be removed twice; others stay."""
    tracker, heard = ModTracker(), []
    with tracker:
        first = tracker.subscribe(pre_forward=lambda call, *_: heard.append("first"))
        with tracker.subscribe(pre_backward=lambda call, grads: heard.append("second")):
            step(mlp.a, x)
        first.remove()
        first.remove()
        step(mlp.a, x)
    assert heard == ["first", "second"]


def test_gradients_turned_on_inside_a_module_are_attributed(x):
    seen = []

    class On(nn.Module):
        def forward(self, x):
            with torch.enable_grad():
                y = x * 2
                y.register_hook(lambda _: seen.append(tracker.stack))
                return torch.autograd.grad((y * 3).sum(), x)[0]

    with ModTracker() as tracker, torch.no_grad():
        nn.Sequential(On())(x)
    assert seen == [("Sequential", "Sequential.0")]


def test_accumulation_belongs_to_the_parameters_module(mlp, x):
    seen = []

    class Borrows(nn.Module):
        def __init__(self):
            super().__init__()
            self.lender = mlp

        def forward(self, x):
            return nn.functional.linear(x, self.lender.a.weight) + self.lender.b(x)

    tracker = ModTracker()
    for parameter in mlp.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: seen.append(tracker.current))
    with tracker:
        step(Borrows(), x)
    assert sorted(seen) == ["Borrows", "Borrows.lender.b"]


def test_history_is_bounded_and_the_newest_stay(x):
    """Older calls are attributed to the outside, the latest to their modules."""
    model, tracker = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), ModTracker(history=4)
    with tracker:
        old = model(x)
        for _ in range(50):
            new = model(x)
    seen = []
    for y in (old, new):
        y.register_hook(lambda _: seen.append(tracker.current))
        y.sum().backward()
    assert seen == [None, "Sequential.1"]
    assert len(tracker._attribution.state().record) <= 9


def test_paths_of_dead_modules_are_dropped(x):
    """Paths of freed modules are dropped."""

    class Makes(nn.Module):
        def forward(self, x):
            return nn.ReLU()(x)

    model = Makes()
    with ModTracker() as tracker, torch.no_grad():
        for _ in range(100):
            model(x)
    assert sum(1 for _ in tracker._attribution.state().walk()) <= 3


def test_tracked_modules_die_by_reference_count(x):
    """The tracker holds no module."""
    model = nn.Sequential(nn.Linear(4, 4))
    with ModTracker() as tracker:
        step(model, x)
        alive = weakref.ref(model[0])
        gc.disable()
        try:
            del model
            assert alive() is None
        finally:
            gc.enable()
    assert tracker.module("Sequential.0") is None


def test_keyword_call_of_an_argument_named_module(x):
    """The patch's own parameter names do not collide with the model's."""

    class Takes(nn.Module):
        def forward(self, *, module, self_=None):
            return module

    with ModTracker():
        assert Takes()(module=x) is x
