"""Sharded modules together with tensor parallelism, nested sharding and torch.compile."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
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
    loss_of,
    mine,
    plain,
    stepped,
    train,
    whole_state,
)


def _even() -> nn.Module:
    """Return the model with blocks that two ranks can halve."""
    model = plain()
    for index in range(2):
        model.inner[index] = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 5))
    return model


def _rows_and_columns() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def _cut_twice(part: Any, mesh: DeviceMesh) -> Any:
    model = _even()
    for block in model.inner:
        parallelize_module(block, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        part.fully_shard(block, mesh=mesh["dp"])
    return part.fully_shard(model, mesh=mesh["dp"])


def _on_two_axes(part: Any, rank: int, world_size: int) -> list[Any]:
    mesh = _rows_and_columns()
    reference, model = _even(), _cut_twice(part, mesh)
    row = mesh["dp"].get_local_rank()
    train(reference, [batch(2, step) for step in range(2)])
    train(model, [mine(batch(2, step), row) for step in range(2)])
    kept = sum(_local(param).numel() for param in model.parameters())
    return [kept, distance(_whole(whole_state(model)), whole_state(reference))]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _whole(state: dict[str, Tensor]) -> dict[str, Tensor]:
    pairs = state.items()
    return {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in pairs}


@requirement(
    "FP-197",
    "A module whose parameters are DTensors over one axis of a mesh, sharded over the other axis,"
    " MUST train to the same state as one process, in optimizer steps and in its state dict.",
    rationale=(
        "models too wide for one rank combine tensor parallelism with sharding over the other axis"
    ),
    profile="distributed",
)
def test_tensor_parallel_parameters_train_as_in_one_process(part, ranks):
    """A 2 x 2 mesh: data parallel over one axis, tensor parallel over the other."""
    numel = sum(param.numel() for param in _even().parameters())
    for kept, error in ranks(4, _on_two_axes):
        assert kept < numel / 2  # both columns hold the head and the unused layer
        assert error < 1e-5


def _outer_first(part: Any, rank: int, world_size: int) -> list[Any]:
    reference, model = plain(), plain()
    loss_of(reference, batch(world_size)).backward()
    try:
        part.fully_shard(model)
        for block in model.inner:
            part.fully_shard(block)
        loss_of(model, mine(batch(world_size), rank)).backward()
    except Exception as error:
        return [str(error), 0.0]
    return ["", distance(stepped(model), stepped(reference))]


@requirement(
    "FP-200",
    "Sharding a module inside an already sharded module MUST either train like one process or "
    "raise an error that names a parameter.",
    rationale="reproduced: the error blamed another rank for the order of the calls",
    profile="distributed",
)
def test_outer_module_sharded_first_is_right_or_refused(part, ranks):
    """The whole model is sharded, and then its blocks."""
    for text, error in ranks(2, _outer_first):
        assert not text or "weight" in text, text
        assert error < 1e-5


class _Residual(nn.Module):
    """Not a torch container: the compiler does not trace into those."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        """Apply two layers to (B, 5)."""
        return self.layers(x)


def _blocks() -> nn.Module:
    model = plain()
    model.inner = nn.ModuleList(_Residual(block) for block in model.inner)
    return model


def _compiled(part: Any, rank: int, world_size: int) -> list[float]:
    reference, found = _blocks(), []
    loss_of(reference, batch(world_size)).backward()
    expected = stepped(reference)
    for compiled_first in (True, False):
        torch.compiler.reset()
        model = _blocks()
        for block in model.inner:
            if compiled_first:
                block.compile(backend="eager", fullgraph=True)
            part.fully_shard(block)
            if not compiled_first:
                block.compile(backend="eager", fullgraph=True)
        part.fully_shard(model)
        loss_of(model, mine(batch(world_size), rank)).backward()
        found.append(distance(stepped(model), expected))
    return found


@requirement(
    "FP-202",
    "A module that compiles to one graph SHOULD still do so as a unit, compiled before or after "
    "sharding, with the gradients of one process.",
    rationale="graph breaks are silent, and each costs more than compiling saves",
    profile="distributed",
)
def test_compiled_units_are_one_graph(part, ranks):
    """Compiled before or after sharding with fullgraph=True."""
    for errors in ranks(2, _compiled):
        assert max(errors) < 1e-5
