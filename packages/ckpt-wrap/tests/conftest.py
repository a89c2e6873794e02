"""Modules and comparisons that several tests of this package share."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn


class Block(nn.Module):
    """Linear, dropout, tanh: random, and with something worth recomputing."""

    def __init__(self, features: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(features, features)
        self.dropout = nn.Dropout(0.5)
        self.calls = 0

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        self.calls += 1
        return torch.tanh(self.dropout(self.linear(x)) * scale)


@pytest.fixture
def block_class() -> type[Block]:
    """A module class with parameters, randomness and a counter of forward runs."""
    return Block


@pytest.fixture
def gradients() -> Callable[..., list[torch.Tensor]]:
    """Gradients of parameters and tensors after `sum(call(module))`, from seed 0."""

    def run(
        module: nn.Module, call: Callable[[nn.Module], Any], *tensors: torch.Tensor
    ) -> list[torch.Tensor]:
        torch.manual_seed(0)
        wanted = [*module.parameters(), *tensors]
        for tensor in wanted:
            tensor.grad = None
        result = call(module)
        sum(part.sum() for part in _tensors(result)).backward()
        return [copy.deepcopy(t.grad) for t in wanted if t.requires_grad]

    return run


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for part in value.values() for t in _tensors(part)]
    if hasattr(value, "__dataclass_fields__"):
        return _tensors(vars(value))
    return [t for part in value for t in _tensors(part)]


@pytest.fixture
def equal() -> Callable[[list[torch.Tensor], list[torch.Tensor]], bool]:
    """Whether two lists of tensors are the same bit for bit."""

    def check(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
        return len(a) == len(b) and all(map(torch.equal, a, b))

    return check
