"""One segment's shard and whole buffer, as some ranks in one process have them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from flat_param.sharded._sharded_params import ShardedParams

Make = Callable[..., list[ShardedParams]]
BOUNDARIES = ("element", "row", "tensor")


def _gather(parts: list[ShardedParams]) -> None:
    for pending in [part.start_gather() for part in parts]:
        if pending is not None:
            pending.wait()


@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_every_rank_has_all_values_after_a_gather(
    parts_of_ranks: Make, world: int, boundary: str
) -> None:
    """However they are cut: odd sizes, a scalar, an empty tensor, ranks without a piece."""
    tensors = (torch.randn(5, 3), torch.randn(()), torch.randn(0, 4), torch.randn(7))
    parts = parts_of_ranks(world, *tensors, boundary=boundary)
    _gather(parts)
    for part in parts:
        for leaf, tensor in zip(part.leaves, tensors, strict=True):
            assert leaf.shape == tensor.shape
            assert torch.equal(leaf, tensor)
