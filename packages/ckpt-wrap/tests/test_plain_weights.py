"""Weights that are not registered as parameters are recomputed, with plain gradients."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from ckpt_wrap import checkpoint_, checkpoint_wrapper

OUTER = torch.linspace(-1, 1, 16).reshape(4, 4)


class Weighted(nn.Module):
    """Stores its weight in the place chosen by `place`."""

    def __init__(self, place) -> None:
        super().__init__()
        self.runs = []  # recomputation appends to a copy of it
        self.note = self.runs.append
        self.made = []
        self.weight_of = place(self, OUTER.clone().requires_grad_())

    def forward(self, x):
        self.note(1)
        y = torch.tanh(x @ self.weight_of())
        self.made.append(weakref.ref(y))
        return torch.sin(y)


def _attribute(module, weight):
    module.weight = weight
    return lambda: module.weight


def _below(module, weight):
    module.child = nn.Identity()
    module.child.weight = weight
    return lambda: module.child.weight


def _view_of_a_flat_one(module, weight):
    flat = nn.Parameter(weight.detach().flatten())
    module.weight = flat.view(4, 4)
    return lambda: module.weight


def _buffer(module, weight):
    module.register_buffer("weight", weight)
    return lambda: module.weight


def _in_a_list(module, weight):
    module.weights = [weight]
    return lambda: module.weights[0]


def _closure(module, weight):
    return lambda: weight


PLACES = [
    _attribute,
    _below,
    _view_of_a_flat_one,
    _buffer,
    _in_a_list,
    _closure,
]


def _run(module, weighted):
    weight = weighted.weight_of()
    x = torch.linspace(-1, 1, 8).reshape(2, 4)
    result = module(x)
    kept = weighted.made[0]() is not None
    (gradient,) = torch.autograd.grad(result.sum(), weight)
    return gradient, kept


@pytest.mark.parametrize("make", [checkpoint_, checkpoint_wrapper])
@pytest.mark.parametrize("place", PLACES)
def test_a_weight_anywhere_is_recomputed(make, place):
    """Forward runs twice, nothing is kept in between, and gradients match the plain module."""
    plain, changed = Weighted(place), Weighted(place)
    expected, kept = _run(plain, plain)
    assert kept
    got, kept = _run(make(changed), changed)
    assert torch.equal(expected, got)
    assert not kept
    assert len(changed.runs) == 2
