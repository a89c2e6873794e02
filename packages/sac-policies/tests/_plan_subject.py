"""A small transformer for which plans are made and compared with measurements."""

from __future__ import annotations

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

WIDTH, HEADS, LAYERS, VOCABULARY = 128, 4, 4, 256


class Block(nn.Module):
    """Attention and a feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (B, T, WIDTH) to the same shape."""
        batch, length, _ = x.shape
        parts = self.qkv(self.norm(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """Returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Predict each token from the tokens before it."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def build(batch: tuple[int, int] = (4, 512)) -> tuple[nn.Module, torch.Tensor]:
    """Return a model and its batch, as the plan command expects."""
    torch.manual_seed(0)
    return Model(), torch.zeros(batch, dtype=torch.int64)


def build_wrongly() -> int:
    """Return an object that is not a model."""
    return 3


class Converted(Model):
    """Refuses fake tensors, as conversions of some libraries do."""

    def __init__(self) -> None:
        super().__init__()
        if isinstance(self.head.weight, FakeTensor):
            raise RuntimeError("cannot swap")
        self.head.weight = self.embedding.weight


def build_converted(batch: tuple[int, int] = (4, 512)) -> tuple[nn.Module, torch.Tensor]:
    """Return a model that can only be built on the meta device, with tied weights."""
    return Converted(), torch.zeros(batch, dtype=torch.int64)


class Failing(Model):
    """Reads a value, which tensors without data do not have."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Fail."""
        return super().forward(tokens) * tokens.sum().item()


def build_failing(batch: tuple[int, int] = (4, 512)) -> tuple[nn.Module, torch.Tensor]:
    """Return a model that fails in a step."""
    return Failing(), torch.zeros(batch, dtype=torch.int64)
