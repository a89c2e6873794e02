"""Names and hooks of modules that are added, removed, moved and shared."""

from __future__ import annotations

import warnings

import torch
from torch import nn

from mod_tracker import ModTracker

from ._small import MLP, leaf, linear, step


class Recursive(nn.Module):
    """A module that calls itself twice."""

    def __init__(self):
        super().__init__()
        self.inner = linear()

    def forward(self, x, n=2):
        """Call itself until the depth is reached."""
        return self.inner(x) if n == 0 else self(x, n - 1)


def test_recursion():
    """No warning is raised, and the format of warnings is unchanged."""
    formatter = warnings.formatwarning
    try:
        with warnings.catch_warnings(record=True) as caught, ModTracker() as tracker:
            warnings.simplefilter("always")
            step(Recursive(), leaf())
        changed = warnings.formatwarning is not formatter
    finally:
        warnings.formatwarning = formatter
    assert not caught
    assert not changed
    assert tracker.parents == {"Global"}


def test_name_of_a_module_that_is_added_later():
    """It is named by its place in the model."""
    model, x = nn.Sequential(linear()), leaf()
    with ModTracker() as tracker:
        model(x)
        model.append(linear())
        model(x)
    assert tracker.get_known_fqn(model[1]) == "Sequential.1"


def test_name_does_not_change_with_the_place_of_a_module(log_events):
    """A part is called before its root, and a layer is moved to another model."""
    tracker, model, old = ModTracker(), MLP(), nn.Sequential(linear())
    events = log_events(tracker)
    with tracker:
        model.a(leaf())
        model(leaf())
        old(leaf())
        nn.Sequential(nn.ReLU(), old[0])(leaf())
    assert events.count("+fw Linear") == 2
    assert events.count("+fw Sequential.0") == 2


def test_modules_in_a_plain_list():
    """They have different names."""

    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = [linear(), linear()]

        def forward(self, x):
            return self.parts[1](self.parts[0](x))

    model = Hidden()
    with ModTracker() as tracker:
        model(leaf())
    assert len({tracker.get_known_fqn(module) for module in model.parts}) == 2


def test_frozen_layer_has_no_backward_events(log_events):
    model, tracker = nn.Sequential(linear(), linear()), ModTracker()
    model[0].requires_grad_(False)
    events = log_events(tracker)
    with tracker:
        step(model, torch.randn(2, 4))
    assert [event for event in events if "bw" in event and event.endswith(".0")] == []


def test_graph_from_before_the_block_belongs_to_no_module(log_ops):
    loss = MLP()(leaf()).sum()
    products = [entry for entry in log_ops(ModTracker(), loss.backward) if entry[1] == "mm"]
    assert set(products) == {("backward", "mm", ())}
