"""Properties and limits of a tracker."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import nn

from mod_tracker import ModTracker


def step(model, x):
    """One forward and backward."""
    model(x).sum().backward()


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
