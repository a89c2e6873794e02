"""Units gathered by hand are shown until they are freed or used up; here in a group of one.

Whole parameters are of another dtype than shards, so that they have a memory of their own.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from flat_param import MixedPrecision, fully_shard
from flat_param.sharded._unit import Unit

pytestmark = pytest.mark.usefixtures("group_of_one")
PRECISE = MixedPrecision(param_dtype=torch.float64)


def _layer(**options: object) -> nn.Module:
    return fully_shard(nn.Linear(4, 3), mixed_precision=PRECISE, **options)


def _x() -> Tensor:
    return torch.linspace(-1, 1, 8, dtype=torch.float64).view(2, 4)


def _whole_bytes(unit: Unit) -> int:
    return sum(part.full.untyped_storage().nbytes() for part in unit.parts)


def test_wait_shows_once() -> None:
    """Before it pieces are shown, after a second one the same tensors."""
    layer = _layer()
    handle = layer.unshard(async_op=True)
    assert layer.weight.dtype == torch.float32
    handle.wait()
    weight = layer.weight
    assert weight.dtype == torch.float64
    handle.wait()
    assert layer.weight is weight


@pytest.mark.parametrize("use", ["reshard", "forward", "state_dict"])
def test_wait_does_nothing_once_the_gather_is_used_up(use: str) -> None:
    """An old handle gathers nothing, and shows nothing that is stale."""
    layer = _layer()
    handle = layer.unshard(async_op=True)
    {"reshard": layer.reshard, "forward": lambda: layer(_x()), "state_dict": layer.state_dict}[
        use
    ]()
    handle.wait()
    assert layer.weight.dtype == torch.float32
    assert not layer._flat_param.sites.shows
    assert not layer._flat_param.is_by_hand
