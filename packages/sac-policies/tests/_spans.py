"""A function of a span that no rule rebuilds, and how often it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sac_policies import span

from ._recipe import is_plain, leaf, run

ROWS, WIDTH = 128, 64
NUMBYTES = ROWS * WIDTH * 4
"""Of `x`, and of a value made of it."""


@pytest.fixture
def x() -> Tensor:
    """Large enough that nothing of its size is small."""
    return leaf(ROWS, WIDTH)


@pytest.fixture
def w() -> Tensor:
    """A square matrix."""
    return leaf(WIDTH, WIDTH)


class Own(torch.autograd.Function):
    """x * sigmoid(x), of which no rule knows; counts its forwards."""

    runs = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Save the input."""
        Own.runs += 1
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """By the saved input."""
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return grad * (s + x * s * (1 - s))


def own_silu(t: Tensor) -> Tensor:
    """Of a tensor, by `Own`."""
    return Own.apply(t)


def own_block(x: Tensor, w: Tensor) -> Tensor:
    """Between two products, in a span."""
    return span(own_silu, "act")(x @ w) @ w


def own_runs(function: Callable[..., Tensor], *leaves: Tensor, policy: Any = None) -> int:
    """How often `Own` runs in a step, of which the gradients are those of no checkpointing."""
    assert is_plain(function, *leaves, policy=policy)
    out = run(function, *leaves, policy=policy)
    Own.runs = 0
    torch.autograd.grad(out.sum(), leaves)
    return Own.runs
