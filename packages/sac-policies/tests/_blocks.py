"""Blocks with dropout, and a stack of them that can return a loss."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    """A residual block with dropout."""

    def __init__(self, width: int = 24, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.norm, self.drop = norm(width), nn.Dropout(0.2)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, *, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Apply the block; masked rows are unchanged."""
        y = self.down(self.drop(F.silu(self.up(self.norm(x))).exp().tanh()))
        return x + (y if mask is None else y * mask)


class Stack(nn.Module):
    """A stack of blocks that returns a loss if a target is passed."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(8, 24)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(24, 3)

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor | None = None, target: Any = None
    ) -> dict[str, torch.Tensor]:
        """Return scores, and a loss if there is a target."""
        x = self.first(x)
        for block in self.blocks:
            x = block(x, mask=mask)
        out = {"scores": self.head(x)}
        if target is not None:
            out["loss"] = F.cross_entropy(out["scores"], target)
        return out


def stack(depth: int = 4) -> Stack:
    """Build the stack from a fixed seed."""
    torch.manual_seed(0)
    return Stack(depth)
