"""Checkpoints of units that tensor parallel has cut, too: on 1 x 2, 2 x 2 and 1 x 4 ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _harness import checks, same_bits, whole
from tensor_parallel import batch, parallel, plain, sharded
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import flat_param

FOLDER, ROWS = Path(), 1
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"replicated": True},
    {"boundary": "tensor"},
)


def mesh_of(world: int, rows: int = 0) -> DeviceMesh:
    """Rows of ranks, each of which has the whole model."""
    rows = rows or ROWS
    return init_device_mesh("cpu", (rows, 1, world // rows), mesh_dim_names=("dp", "one", "tp"))


def adamw(model: nn.Module, lr: float = 1e-2) -> torch.optim.AdamW:
    """Made after sharding."""
    return torch.optim.AdamW(model.parameters(), lr=lr)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Some steps of the same batch on all ranks; torch computes nothing with uneven parts."""
    for step in steps:
        optimizer.zero_grad()
        if dist.get_world_size() // ROWS == 2:
            model(batch(step, 0)).square().mean().backward()
        else:
            for param in model.parameters():
                param.grad = (param.detach() + step).sin()
        optimizer.step()


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Everything, whole: DTensors are made so. Collective."""
    found: dict[str, Any] = whole(flat_param.full_state_dict(model, optimizer=optimizer))
    return found


def saved(world: int, name: str, **options: Any) -> tuple[Path, dict[str, Any]]:
    """A checkpoint after two steps, and what it must hold."""
    model = sharded(mesh_of(world), **options)
    optimizer = adamw(model)
    train(model, optimizer, range(2))
    flat_param.save_sharded(model, FOLDER / name, optimizer=optimizer)
    return FOLDER / name, state(model, optimizer)


def fresh(mesh: DeviceMesh, **options: Any) -> tuple[nn.Module, torch.optim.AdamW]:
    """Another model with other values, and an optimizer without state."""
    model = sharded(mesh, **options)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(7)
    return model, adamw(model, lr=0.5)


def check_any_cut_loads_into_any_other(rank: int, world: int) -> None:
    """Another boundary, another mesh, and no tensor parallel at all; and back."""
    for index, options in enumerate(OPTIONS):
        path, expected = saved(world, f"any-{index}", **options)
        model, optimizer = fresh(mesh_of(world), **OPTIONS[index - 1])
        flat_param.load_sharded(model, path, optimizer=optimizer)
        same_bits(state(model, optimizer), expected)
        model, optimizer = fresh(mesh_of(world, rows=world), **options)
        flat_param.load_sharded(model, path, optimizer=optimizer)
        same_bits(state(model, optimizer), expected)
        other = flat_param.fully_shard(plain())
        optimizer = adamw(other, lr=0.5)
        flat_param.load_sharded(other, path, optimizer=optimizer)
        same_bits(state(other, optimizer), expected)
        back = FOLDER / f"back-{index}"
        flat_param.save_sharded(other, back, optimizer=optimizer)
        model, optimizer = fresh(mesh_of(world), **options)
        flat_param.load_sharded(model, back, optimizer=optimizer)
        same_bits(state(model, optimizer), expected)


def check_torch_reads_what_is_saved(rank: int, world: int) -> None:
    """torch.distributed.checkpoint fills a plain state dict, and one of DTensors."""
    path, expected = saved(world, "for-torch")
    target = {"model": {key: torch.zeros_like(v) for key, v in plain().state_dict().items()}}
    dcp.load(target, checkpoint_id=path)
    same_bits(dict(target["model"]), expected["model"])
    cut = parallel(mesh_of(world)["tp"])
    with torch.no_grad():
        for param in cut.parameters():
            param.zero_()
    parts = {"model": cut.state_dict()}
    dcp.load(parts, checkpoint_id=path)
    assert any(isinstance(tensor, DTensor) for tensor in parts["model"].values())
    same_bits(whole(dict(parts["model"])), expected["model"])


def check_what_torch_saves_is_loaded(rank: int, world: int) -> None:
    """Shards of parameters that are cut over both axes, and their moments."""
    for index, options in enumerate(OPTIONS[1:3]):
        model = sharded(mesh_of(world), **options)
        optimizer = adamw(model)
        train(model, optimizer, range(2))
        path = FOLDER / f"torchs-{index}"
        given = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
        assert any(isinstance(value, DTensor) for value in given["model"].values())
        dcp.save(given, checkpoint_id=path)
        again, again_optimizer = fresh(mesh_of(world), **options)
        flat_param.load_sharded(again, path, optimizer=again_optimizer)
        same_bits(state(again, again_optimizer), state(model, optimizer))
        again, again_optimizer = fresh(mesh_of(world), **options)
        full = flat_param.full_state_dict(model, optimizer=optimizer)
        assert not any(isinstance(value, DTensor) for value in full["model"].values())
        flat_param.load_full_state_dict(again, full, optimizer=again_optimizer)
        same_bits(state(again, again_optimizer), state(model, optimizer))


def check_state_by_block_is_refused(rank: int, world: int) -> None:
    """Though one rank of each row has all that tensor parallel left of the parameter."""
    model = sharded(mesh_of(world), replicated=True)
    optimizer = adamw(model)
    train(model, optimizer, range(1))
    for values in optimizer.state.values():
        values["scales"] = torch.ones(3)
    with pytest.raises(flat_param.StateError, match=r"'scales' of parameter 'blocks.0.up.weight'"):
        flat_param.save_sharded(model, FOLDER / "never", optimizer=optimizer)


run = checks(globals(), "ROWS")
