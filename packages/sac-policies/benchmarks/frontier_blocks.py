"""The four blocks that fronts are drawn of, as their models write them."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, TOKENS, BATCH, HEADS = 256, 128, 2, 4


def _heads(t: torch.Tensor) -> torch.Tensor:
    return t.view(BATCH, TOKENS, HEADS, -1).transpose(1, 2)


def _joined(t: torch.Tensor) -> torch.Tensor:
    return t.transpose(1, 2).reshape(BATCH, TOKENS, WIDTH)


class _Norm(nn.Module):
    """RMS norm, operator by operator."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))


class Llama(nn.Module):
    """Norms by hand, rotary positions, attention, SwiGLU without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = _Norm(), _Norm()
        self.query, self.key, self.value, self.out = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )
        self.gate, self.up = (nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)
        angles = torch.outer(torch.arange(TOKENS), 0.5 ** torch.arange(WIDTH // HEADS // 2))
        self.register_buffer("cos", angles.cos().repeat(1, 2))
        self.register_buffer("sin", angles.sin().repeat(1, 2))

    def _turned(self, t: torch.Tensor) -> torch.Tensor:
        one, other = t.chunk(2, -1)
        return t * self.cos + torch.cat((-other, one), -1) * self.sin

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.before(x)
        query, key = self._turned(_heads(self.query(y))), self._turned(_heads(self.key(y)))
        value = _heads(self.value(y))
        x = x + self.out(_joined(F.scaled_dot_product_attention(query, key, value, is_causal=True)))
        y = self.between(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Gpt2(nn.Module):
    """Layer norms, one projection for queries, keys and values, GELU, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = map(_heads, self.attention(self.before(x)).chunk(3, -1))
        made = _joined(F.scaled_dot_product_attention(query, key, value, is_causal=True))
        x = x + self.dropout(self.out(made))
        return x + self.dropout(self.down(F.gelu(self.up(self.between(x)))))


class ResNet(nn.Module):
    """Two convolutions, each with a batch norm, and what is added at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(64, 64, 3, padding=1, bias=False) for _ in range(2))
        self.one, self.two = nn.BatchNorm2d(64), nn.BatchNorm2d(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.one(self.first(x)))
        return F.relu(x + self.two(self.second(y)))


class Tanh(nn.Module):
    """Two layers and tanh."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


BLOCKS: dict[str, tuple[type[nn.Module], tuple[int, ...]]] = {
    "Llama": (Llama, (BATCH, TOKENS, WIDTH)),
    "GPT-2": (Gpt2, (BATCH, TOKENS, WIDTH)),
    "ResNet": (ResNet, (4, 64, 32, 32)),
    "tanh MLP": (Tanh, (BATCH * TOKENS, WIDTH)),
}
"""By name: the class, and the shape of what it takes and gives."""
