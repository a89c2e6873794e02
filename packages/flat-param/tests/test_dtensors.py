"""Where the part of a DTensor that a rank has begins."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from flat_param import StateError
from flat_param.buffers._dtensors import DTensorPlace, place_of_dtensor


@contextmanager
def as_rank(rank: int) -> Iterator[None]:
    """One of six, in a group that sends nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=6)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("shape", [(10, 6), (7, 5), (1, 3), (0, 2)])
def test_part_begins_where_torch_cuts(shape: tuple[int, int]) -> None:
    """Of even, uneven, empty and twice cut tensors; copies beside each other have one first."""
    whole = torch.arange(math.prod(shape)).view(shape)
    for placements in product([Shard(0), Shard(1), Replicate()], repeat=2):
        written = torch.zeros(shape)
        for rank in range(6):
            with as_rank(rank):
                mesh = init_device_mesh("cpu", (2, 3))
                tensor = distribute_tensor(whole, mesh, placements, src_data_rank=None)
                place, local = place_of_dtensor(tensor), tensor.to_local()
                assert place is not None
                pairs = zip(place.offsets, local.shape, strict=True)
                window = tuple(slice(first, first + size) for first, size in pairs)
                assert torch.equal(whole[window], local), (rank, placements)
                written[window] = 1
        assert (written == 1).all(), placements


def test_part_that_is_not_one_rectangle_is_refused() -> None:
    """By its placement, since a checkpoint has no place for it."""
    with as_rank(0):
        mesh = init_device_mesh("cpu", (6,))
        strided = _StridedShard(0, split_factor=2)
        place = DTensorPlace(mesh, (strided,), torch.Size([24]), (1,))
        with pytest.raises(StateError, match=r"shape \(24,\) has the placement _S"):
            _ = place.offsets
