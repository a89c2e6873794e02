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
    if isinstance(value, (list, tuple)):
        return [t for part in value for t in _tensors(part)]
    return []


@pytest.fixture
def equal() -> Callable[[list[torch.Tensor], list[torch.Tensor]], bool]:
    """Whether two lists of tensors are the same bit for bit."""

    def check(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
        return len(a) == len(b) and all(map(torch.equal, a, b))

    return check


class TwoParts(torch.Tensor):
    """A tensor subclass made of two tensors, without storage of its own."""

    @staticmethod
    def __new__(cls, a: torch.Tensor, b: torch.Tensor) -> TwoParts:
        return torch.Tensor._make_wrapper_subclass(cls, a.shape, dtype=a.dtype)

    def __init__(self, a: torch.Tensor, b: torch.Tensor) -> None:
        self.a = a
        self.b = b

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["a", "b"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride) -> TwoParts:
        return TwoParts(inner["a"], inner["b"])

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} was run on the subclass")


@pytest.fixture
def two_parts() -> type[TwoParts]:
    """A tensor subclass made of two tensors."""
    return TwoParts
