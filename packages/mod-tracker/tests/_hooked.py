"""Modules that run any function under hooks that count tensors, and two such functions."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mod_tracker import compile_safe_hooks
from mod_tracker._containers import TRACES_IDENTITY

SKIPPED_WITHOUT = pytest.mark.skipif(
    not TRACES_IDENTITY, reason="torch before 2.13 cannot compile whether two lists are one"
)
WITH_IDENTITY = [
    False,
    pytest.param(True, marks=SKIPPED_WITHOUT),
]


class Does(nn.Module):
    """Runs a function as its forward, and has a weight."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.full((3,), 2.0))

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)


class Outer(nn.Module):
    """What is hooked lies below."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


def hooked(model, told):
    """Hooks that write down how many tensors they are told of."""

    def write(kind):
        return lambda name, *values: told.append((kind, *map(len, values)))

    kinds = ("pre_fw", "post_fw", "pre_bw", "post_bw")
    return compile_safe_hooks(model, **{f"{kind}_hook": write(kind) for kind in kinds})


def append(module, items):
    """Adds what it makes."""
    items.append(items[0] * module.weight)
    return items[0].sin()


def pop(module, items):
    """Takes the first away."""
    return items.pop(0).sin()
