"""What the shipped adapters add to the libraries they adapt."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from torchparts_conformance.adapters import fsdp2


@pytest.fixture
def mesh():
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_states_of_fully_shard_are_whole_tensors(mesh):
    """Sharded ones are gathered, and others given as they are."""
    plain = torch.arange(4.0)
    assert fsdp2._whole(plain) is plain
    whole = fsdp2._whole(distribute_tensor(plain, mesh, [Shard(0)]))
    assert type(whole) is torch.Tensor
    assert torch.equal(whole, plain)
