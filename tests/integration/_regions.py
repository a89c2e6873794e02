"""Blocks, and a step that runs each block as a region."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from sac_policies import checkpoint

PRODUCTS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]


class Block(nn.Module):
    """A feed-forward network with dropout and a residual, as in xformers' own tests."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(32), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(32, 128, bias=False), nn.Linear(128, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))


def model_of(count: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(count)))


def step(model: nn.Module, run: Any = None) -> Tensor:
    """Run forward and backward through every block by `run(block, x)`; return the loss."""
    torch.manual_seed(1)
    x = torch.randn(16, 32, requires_grad=True)
    for block in model.children():
        x = block(x) if run is None else run(block, x)
    loss = x.pow(2).sum()
    loss.backward()
    return loss.detach()


def swap(function: Any, block: nn.Module, x: Tensor, **options: Any) -> Tensor:
    out: Tensor = function(block, x, **options)
    return out


def ours(policy: Any) -> Any:
    """Run a block in our `checkpoint`."""
    return functools.partial(swap, checkpoint, policy=policy)
