"""A small model, its input, and a step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mod_tracker._torch_compat import SHOWS_SAVED

shows_saved = pytest.mark.skipif(
    not SHOWS_SAVED, reason="torch 2.9 does not show what a graph saves; a report notes it"
)


def linear():
    """A 4 x 4 layer without bias: each product costs 2 * rows * 16 operations."""
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
        """Run both layers."""
        return self.b(self.a(x).relu())
