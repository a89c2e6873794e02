"""Models of the scenarios, and bitwise comparison of gradients."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """A residual block with a norm, dropout, and a layer whose output is used twice."""

    def __init__(self, width: int, *, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(self.norm(x))
        return x + self.dropout(self.down(F.silu(y) * y))


class Stack(nn.Module):
    """Blocks and a head."""

    def __init__(self, width: int = 8, depth: int = 2, *, dropout: float = 0.1) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, dropout=dropout) for _ in range(depth))
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Attention(nn.Module):
    """Causal attention over `(batch, time, width)`, in a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        parts = self.qkv(self.norm(x)).view(batch, time, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).reshape(batch, time, width))


class Transformer(nn.Module):
    """A small language model over `(batch, time)` of bytes."""

    def __init__(self, width: int = 32, depth: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.layers = nn.ModuleList(
            nn.Sequential(Attention(width, 2), Block(width)) for _ in range(depth)
        )
        self.head = nn.Linear(width, 256)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def stack(seed: int = 0, *, dropout: float = 0.1) -> Stack:
    """Return the same stack for the same seed."""
    torch.manual_seed(seed)
    return Stack(dropout=dropout)


def inputs(seed: int = 1, rows: int = 4) -> Tensor:
    """Return a batch `(rows, 8)` that requires a gradient."""
    torch.manual_seed(seed)
    return torch.randn(rows, 8, requires_grad=True)


def backward(model: nn.Module, x: Tensor, seed: int = 2) -> None:
    """Run forward and backward with a fixed dropout."""
    torch.manual_seed(seed)
    model(x).square().sum().backward()


def gradients(model: nn.Module, x: Tensor, seed: int = 2) -> list[Tensor | None]:
    """Return the gradients of a step: of the parameters in order, and of `x`."""
    model.zero_grad()
    x.grad = None
    backward(model, x, seed)
    found = [each.grad for each in (*model.parameters(), x)]
    return [None if grad is None else grad.detach().clone() for grad in found]


def differ(first: list[Tensor | None], second: list[Tensor | None]) -> str:
    """Return the indices of gradients that are not bit-identical; None equals only None."""
    places = [
        str(at)
        for at, (one, other) in enumerate(zip(first, second, strict=True))
        if (one is None) is not (other is None)
        or (one is not None and other is not None and not torch.equal(one, other))
    ]
    return f"gradients {', '.join(places)} of {len(first)} are not plain's" if places else ""
