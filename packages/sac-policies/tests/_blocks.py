"""Blocks with dropout, and a stack of them with a loss of its own."""

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
        """Apply it; rows that are masked stay."""
        y = self.down(self.drop(F.silu(self.up(self.norm(x))).exp().tanh()))
        return x + (y if mask is None else y * mask)


class Stack(nn.Module):
    """Blocks, with a loss of their own where there is a target."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(8, 24)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(24, 3)

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor | None = None, target: Any = None
    ) -> dict[str, torch.Tensor]:
        """Give scores, and a loss if there is a target."""
        x = self.first(x)
        for block in self.blocks:
            x = block(x, mask=mask)
        out = {"scores": self.head(x)}
        if target is not None:
            out["loss"] = F.cross_entropy(out["scores"], target)
        return out


def stack(depth: int = 4) -> Stack:
    """Build it alike each time."""
    torch.manual_seed(0)
    return Stack(depth)
