"""DTensors that no unit has divided: ignored ones, and those beside units; one check per claim.

Ranks are a mesh of `rows` that share units, and of columns over which tensor parallel cuts.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from _harness import checks, raises, same_bits, whole, whole_state
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import flat_param

FOLDER, ROWS = Path(), 1


class Model(nn.Module):
    """A unit, and DTensors outside of it: sharded by rows, by columns, and replicated."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(4, 6)
        self.rows, self.columns = (nn.Parameter(_cut(torch.randn(5, 6), mesh, d)) for d in (0, 1))
        self.same = nn.Parameter(_cut(torch.randn(6), mesh, None))
        self.plain = nn.Parameter(torch.randn(3))
        self.register_buffer("table", _cut(torch.randn(5, 3), mesh, 0))


def _cut(tensor: Tensor, mesh: DeviceMesh | None, dim: int | None) -> Tensor:
    if mesh is None:
        return tensor
    placement = Replicate() if dim is None else Shard(dim)
    return distribute_tensor(tensor, mesh, [placement])


def mesh_of(world: int) -> DeviceMesh:
    """Rows and columns."""
    return init_device_mesh("cpu", (ROWS, world // ROWS), mesh_dim_names=("dp", "tp"))


def beside(world: int, axis: str = "tp") -> Model:
    """A unit inside of a module that is none."""
    model = Model(mesh_of(world)[axis])
    flat_param.fully_shard(model.inner, mesh=mesh_of(world)["dp"])
    return model


def ignored(world: int, axis: str = "tp") -> Model:
    """A unit that leaves all of these alone."""
    model = Model(mesh_of(world)[axis])
    flat_param.fully_shard(model.inner, mesh=mesh_of(world)["dp"])
    others = {param for param in model.parameters() if isinstance(param, DTensor)} | {model.plain}
    return flat_param.fully_shard(model, mesh=mesh_of(world)["dp"], ignored_params=others)


def step(model: nn.Module, seed: int = 1) -> torch.optim.Optimizer:
    """An optimizer that has made a step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for param in model.parameters():
        param.grad = (param.detach() + seed).sin()
    optimizer.step()
    return optimizer


def zeroed(model: nn.Module) -> nn.Module:
    """With nothing of what was there."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()
    return model


def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All of both, whole. Collective."""
    return whole(flat_param.full_state_dict(model, optimizer=optimizer))


def check_saved_and_loaded(rank: int, world: int) -> None:
    """Model and moments, at once and beside a step; by ours and by torch's reader."""
    axes = ("tp", "dp") if world == ROWS else ("tp",)  # all ranks share the unit, or a DTensor
    for index, (make, axis) in enumerate(product((beside, ignored), axes)):
        model = make(world, axis)
        optimizer = step(model)
        expected = states(model, optimizer)
        path = FOLDER / f"saved-{index}"
        if index % 2:
            flat_param.save_sharded(model, path, optimizer=optimizer)
        else:
            future = flat_param.async_save_sharded(model, path, optimizer=optimizer)
            step(model)
            future.result()
        again = zeroed(make(world, axis))
        optimizer = step(again, seed=5)
        flat_param.load_sharded(again, path, optimizer=optimizer)
        same_bits(states(again, optimizer), expected)
        target = {"model": {key: torch.zeros_like(v) for key, v in expected["model"].items()}}
        dcp.load(target, checkpoint_id=path)
        same_bits(target["model"], expected["model"])
        stored = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        for key, tensor in expected["model"].items():
            chunks = stored[f"model.{key}"].chunks
            assert sum(each.sizes.numel() for each in chunks) == tensor.numel(), key


def check_loaded_over_another_mesh(rank: int, world: int) -> None:
    """Whatever cut them, and into plain tensors."""
    model = beside(world)
    optimizer = step(model)
    expected = states(model, optimizer)
    path = FOLDER / "any"
    flat_param.save_sharded(model, path, optimizer=optimizer)
    plain = Model(None)
    flat_param.fully_shard(plain.inner)
    for other in (zeroed(beside(world)), zeroed(ignored(world)), plain):
        others = step(other, seed=5)
        flat_param.load_sharded(other, path, optimizer=others)
        same_bits(states(other, others), expected)


def check_whole_states_are_loaded(rank: int, world: int) -> None:
    """Moments of DTensors as DTensors, from whole tensors and from such."""
    model = ignored(world)
    optimizer = step(model)
    given = flat_param.full_state_dict(model, optimizer=optimizer)
    expected = whole(given)
    for optim in (whole(expected["optim"]), given["optim"]):
        again = zeroed(ignored(world))
        others = step(again, seed=5)
        state = {"model": given["model"], "optim": optim}
        flat_param.load_full_state_dict(again, state, optimizer=others)
        same_bits(states(again, others), expected)
        others.step()


def check_error_puts_back(rank: int, world: int) -> None:
    """What was written before it, in DTensors, too."""
    model = beside(world)
    path = FOLDER / "error"
    flat_param.save_sharded(model, path, optimizer=step(model))
    again = beside(world)
    optimizer = step(again, seed=3)
    if rank == world - 1:
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    before = whole(whole_state(again))
    raises(
        flat_param.FlatParamError,
        "flat_param.",
        lambda: flat_param.load_sharded(again, path, optimizer=optimizer),
    )
    same_bits(whole(whole_state(again)), before)


def check_norm_is_that_of_whole_gradients(rank: int, world: int) -> None:
    """Cut ones are summed over their axis, and counted once for all rows; all are scaled."""
    model = ignored(world)
    row = mesh_of(world)["dp"].get_local_rank()
    for param in (model.rows, model.columns, model.same, model.plain):
        param.grad = (param.detach() + 1).sin()
    model.rows.grad = model.rows.grad * (row + 1)  # rows differ: the largest norm counts
    reference = Model(None)
    named = {n: p for n, p in reference.named_parameters() if not n.startswith("inner.")}
    grads = {name: (param.detach() + 1).sin() for name, param in named.items()}
    grads["rows"] = grads["rows"] * ROWS
    expected = nn.utils.get_total_norm(grads.values())
    norm = model.clip_grad_norm_(0.5)
    torch.testing.assert_close(norm, expected)
    scaled = whole(model.columns.grad)
    torch.testing.assert_close(scaled, grads["columns"] * 0.5 / expected)
    assert isinstance(model.columns.grad, DTensor)
    for param in (model.rows, model.columns, model.same):  # a rank may have none of them
        param.grad = None
    assert model.clip_grad_norm_(10.0) < norm


run = checks(globals(), "ROWS")
