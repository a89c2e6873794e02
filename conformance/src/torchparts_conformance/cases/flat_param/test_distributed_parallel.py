"""Sharded modules beside what else divides one: tensor parallel, smaller groups, other paths."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from torchparts_conformance import requirement
from torchparts_conformance.cases.flat_param._sharded import (
    batch,
    distance,
    mine,
    plain,
    train,
)


def _even() -> nn.Module:
    """The model with blocks that two ranks cut in halves."""
    model = plain()
    for index in range(2):
        model.inner[index] = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 5))
    return model


def _on_two_axes(part: Any, rank: int, world_size: int) -> list[Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    reference, model = _even(), _even()
    for block in model.inner:
        parallelize_module(block, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        part.fully_shard(block, mesh=mesh["dp"])
    part.fully_shard(model, mesh=mesh["dp"])
    row = mesh["dp"].get_local_rank()
    train(reference, [batch(2, step) for step in range(2)])
    train(model, [mine(batch(2, step), row) for step in range(2)])
    kept = sum(_local(param).numel() for param in model.parameters())
    return [kept, distance(_whole(model.state_dict()), reference.state_dict())]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _whole(state: dict[str, Tensor]) -> dict[str, Tensor]:
    pairs = state.items()
    return {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in pairs}


@requirement("FP-197")
def test_parameters_cut_by_tensor_parallel_train_as_in_one_process(part, ranks):
    """Two rows of ranks hold parts, two columns cut the layers of the blocks in halves."""
    numel = sum(param.numel() for param in _even().parameters())
    for kept, error in ranks(4, _on_two_axes):
        assert kept < numel / 2  # the head and what nothing uses are on both columns
        assert error < 1e-5
