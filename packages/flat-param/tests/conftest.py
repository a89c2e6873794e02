"""Fixtures for all tests of this package."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Every test starts from the same random state."""
    torch.manual_seed(0)


@pytest.fixture
def mlp() -> nn.Sequential:
    """Two layers of odd sizes, so that 16-byte alignment leaves gaps."""
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))


@pytest.fixture
def own_all() -> Callable[[Iterable[Tensor], Tensor], bool]:
    """Whether every tensor lies in the memory of one buffer."""

    def check(tensors: Iterable[Tensor], buffer: Tensor) -> bool:
        home = buffer.untyped_storage().data_ptr()
        return all(tensor.untyped_storage().data_ptr() == home for tensor in tensors)

    return check


@pytest.fixture
def holder() -> Callable[..., nn.Module]:
    """Make a module of given tensors, as parameters p0, p1, ..."""

    def make(*tensors: Tensor) -> nn.Module:
        module = nn.Module()
        for index, tensor in enumerate(tensors):
            trainable = tensor.is_floating_point() or tensor.is_complex()
            kept = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, trainable)
            module.register_parameter(f"p{index}", kept)
        return module

    return make
