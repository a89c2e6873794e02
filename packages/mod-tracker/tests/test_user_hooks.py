"""Names and hooks of modules that are added, removed, moved and shared."""

from __future__ import annotations

import warnings

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import mod_tracker

from ._small import MLP, leaf, linear, step


def events_of(tracker):
    """A list to which the four user hooks append "+fw name", "-fw name", "+bw name", "-bw name"."""
    events = []

    def write(sign):
        def hook(module, *_):
            name = None if module is None else tracker.get_known_fqn(module)
            events.append(f"{sign} {name}")

        return hook

    tracker.register_user_hooks(write("+fw"), write("-fw"), write("+bw"), write("-bw"))
    return events


def backward_of(events):
    """Select the backward events."""
    return [event for event in events if "bw" in event]


def names_of(*names):
    """Build a set of parents."""
    return frozenset(("Global", *names))


class Products(TorchDispatchMode):
    """Records direction and parents of every matrix product."""

    def __init__(self, tracker):
        super().__init__()
        self.tracker, self.seen = tracker, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.mm.default:
            self.seen.append((self.tracker.is_bw, frozenset(self.tracker.parents)))
        return func(*args, **(kwargs or {}))


def products_of(run):
    """Direction and parents of every matrix product of a run."""
    tracker = mod_tracker.ModTracker()
    log = Products(tracker)
    with tracker, log:
        run()
    return log.seen


def events_in(run):
    """Events of a tracker during a run."""
    tracker = mod_tracker.ModTracker()
    events = events_of(tracker)
    with tracker:
        run()
    return events


class Recursive(nn.Module):
    """A module that calls itself twice."""

    def __init__(self):
        super().__init__()
        self.inner = linear()

    def forward(self, x, n=2):
        """Call itself until the depth is reached."""
        return self.inner(x) if n == 0 else self(x, n - 1)


def _names_of_calls(tracker, module):
    names = []
    tracker.register_user_hooks(
        pre_fw_hook=lambda called, _: (
            names.append(tracker.get_known_fqn(called)) if called is module else None
        )
    )
    return names


def test_recursion():
    """No warning is raised, and the format of warnings is unchanged."""
    formatter = warnings.formatwarning
    try:
        with warnings.catch_warnings(record=True) as caught, mod_tracker.ModTracker() as tracker:
            warnings.simplefilter("always")
            step(Recursive(), leaf())
        changed = warnings.formatwarning is not formatter
    finally:
        warnings.formatwarning = formatter
    assert not caught
    assert not changed
    assert tracker.parents == {"Global"}


def test_late_module():
    """It is named by its place in the model."""
    model, x = nn.Sequential(linear()), leaf()
    with mod_tracker.ModTracker() as tracker:
        model(x)
        model.append(linear())
        model(x)
    assert tracker.get_known_fqn(model[1]) == "Sequential.1"


def test_part_called_before_its_root():
    """Its name does not change."""
    tracker, model = mod_tracker.ModTracker(), MLP()
    names = _names_of_calls(tracker, model.a)
    with tracker:
        model.a(leaf())
        model(leaf())
    assert len(set(names)) == 1


def test_moved_module():
    """Its name does not change."""
    tracker, old = mod_tracker.ModTracker(), nn.Sequential(linear())
    names = _names_of_calls(tracker, old[0])
    with tracker:
        old(leaf())
        nn.Sequential(nn.ReLU(), old[0])(leaf())
    assert names == ["Sequential.0"] * 2


def test_modules_in_a_plain_list():
    """They have different names."""

    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = [linear(), linear()]

        def forward(self, x):
            return self.parts[1](self.parts[0](x))

    model = Hidden()
    with mod_tracker.ModTracker() as tracker:
        model(leaf())
    assert len({tracker.get_known_fqn(module) for module in model.parts}) == 2


def test_frozen_layer():
    """It has no backward, so no backward events."""
    model = nn.Sequential(linear(), linear())
    model[0].requires_grad_(False)
    events = events_in(lambda: step(model, torch.randn(2, 4)))
    assert not [e for e in backward_of(events) if e.endswith(".0")]


def test_graph_from_before_the_block():
    """Nodes created before the block belong to no module."""
    loss = MLP()(leaf()).sum()
    products = products_of(loss.backward)
    assert set(products) == {(True, names_of())}
