"""Properties of a tracker: running module, phase and names."""

from __future__ import annotations

import torch
from torch import nn

import mod_tracker

from ._small import MLP, leaf, linear


class Asked(nn.Module):
    """Reads a property in forward and in backward."""

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


def test_in_module():
    """Patterns for names and for prefixes."""
    tracker = mod_tracker.ModTracker()
    asked = Asked(lambda: [tracker.in_module(p) for p in ("0.*", "Sequential.0", "1", "*.9")])
    with tracker:
        nn.Sequential(nn.Sequential(asked))(leaf())
    assert asked.answers == [[True, True, False, False]]


def test_module_of_a_name():
    """From module to name and back, and None when the module is freed."""
    tracker, model = mod_tracker.ModTracker(), MLP()
    with tracker:
        model(leaf())
    assert tracker.module("MLP.a") is model.a
    assert tracker.module("MLP.z") is None
    del model
    assert tracker.module("MLP.a") is None


def test_double_backward():
    """FLOPs of a gradient penalty: all of them belong to modules."""
    model, x = nn.Sequential(linear(), nn.Tanh(), linear()), leaf()
    with mod_tracker.profile_flops() as report:
        grad = torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]
        grad.pow(2).sum().backward()
    assert report.outside.total == 0
    # Products of 64 operations: layer 2 has one in the first backward, and one for its weight in
    # the second; layer 0 has one, two for that product's factors, and two for those of its forward
    # product.
    assert (report["Sequential.0"].backward, report["Sequential.2"].backward) == (5 * 64, 2 * 64)
