"""A region under the recipe engine, and what is asked about it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sac_policies import checkpoint, recompute_all, report


def leaf(*shape: int) -> torch.Tensor:
    """A leaf of this shape with spread values."""
    numel = torch.Size(shape).numel()
    return torch.linspace(-1.3, 1.7, numel).reshape(shape).requires_grad_()


def run(function: Callable[..., Any], *args: Any, policy: Any = None) -> Any:
    """Call under the recipe engine, keeping as little as it can."""
    return checkpoint(function, *args, policy=policy or recompute_all(), engine="recipe")


def bytes_held(function: Callable[..., Any], *args: Any, policy: Any = None) -> int:
    """What the engine holds of what the region makes."""
    return report(function, *args, policy=policy or recompute_all(), engine="recipe").held_bytes


def is_plain(function: Callable[..., Any], *leaves: torch.Tensor, policy: Any = None) -> bool:
    """Whether gradients are bitwise those of no checkpointing."""
    expected = torch.autograd.grad(function(*leaves).sum(), leaves)
    found = torch.autograd.grad(run(function, *leaves, policy=policy).sum(), leaves)
    return all(map(torch.equal, expected, found))
