"""Units, and copies of them, on four ranks."""

from __future__ import annotations

import pytest
import torch
from _harness import batches, loss_of, sharded, share
from _whole import whole_grads
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import flat_param


def check_copies_in_another_order_are_named(rank: int, world: int) -> None:
    """Ranks that divide the parameters agree, but the copies do not: no gradient is there."""
    model, (ids,) = sharded(mesh=init_device_mesh("cpu", (2, 2))), batches(world, 1)
    model.order = (0, 1, 2) if rank < 2 else (1, 0, 2)
    with pytest.raises(flat_param.CommError) as caught:
        loss_of(model, share(ids, rank)).backward()
    first, other = (rank % 2), (rank % 2) + 2
    assert str(caught.value).startswith(f"flat_param.fully_shard: rank {first} did "), caught.value
    assert f" where rank {other} did " in str(caught.value)
    assert all(param.grad is None for param in model.parameters())


def check_sums_are_those_in_the_order_of_ranks(rank: int, world: int) -> None:
    """Bit by bit: gradients are the mean of what one process has for each rank's share."""
    torch.manual_seed(0)
    reference, inputs = nn.Linear(5, 7), torch.randn(world, 2, 5)
    total: list[Tensor] = []
    for each in inputs:
        reference.zero_grad()
        reference(each).square().sum().backward()
        grads = [param.grad.clone() for param in reference.parameters()]
        total = [a + b for a, b in zip(total, grads, strict=True)] if total else grads
    for boundary in ("element", "row"):
        model = nn.Linear(5, 7)
        model.load_state_dict(reference.state_dict())
        flat_param.fully_shard(model, boundary=boundary)
        model(inputs[rank]).square().sum().backward()
        for found, expected in zip(whole_grads(model).values(), total, strict=True):
            assert torch.equal(found, expected / world), boundary
