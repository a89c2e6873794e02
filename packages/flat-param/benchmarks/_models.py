"""Models of the flat-param benchmarks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

SIZES = {"0.16M": 32, "2.5M": 128, "9.9M": 256}


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """`(batch, tokens, width)` to the same."""
        normed = self.norms[0](x)
        heads = (
            part(normed).unflatten(-1, (-1, 64)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


class LanguageModel(nn.Module):
    """Embedding, blocks, head; `LanguageModel(640, 16, 16384)` has 99.7M parameters."""

    def __init__(self, width: int, depth: int, words: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """`(batch, tokens)` to `(batch, tokens, words)`."""
        return self.head(self.blocks(self.embed(ids)))


class Tower(nn.Module):
    """150 small linear layers: 300 tensors, almost no arithmetic."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(150))

    def forward(self, x: Tensor) -> Tensor:
        """`(batch, 32)` to the same."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def many_parameters(width: int) -> nn.ParameterList:
    """300 parameters, alternately `(width, width)` and `(width,)`."""
    torch.manual_seed(0)
    shapes = [(width, width), (width,)] * 150
    return nn.ParameterList(nn.Parameter(torch.randn(shape) * 0.02) for shape in shapes)
