"""Loads on another number of ranks what `dcp_states.py` and `own_checkpoints.py` have saved."""

from __future__ import annotations

from pathlib import Path

import torch.distributed.checkpoint as dcp
from _harness import checks
from _states import optimizer_of, same, sharded, train, truth, values_of
from dcp_states import BOUNDARIES, load, state_of
from torch.distributed.device_mesh import init_device_mesh

import flat_param

FOLDER = Path()


def check_torch_resumes(rank: int, world: int) -> None:
    """Some ranks have nothing of many parameters."""
    for boundary, saved in zip(BOUNDARIES, BOUNDARIES[1:] + BOUNDARIES[:1], strict=True):
        model = sharded(9, boundary=boundary)
        optimizer = optimizer_of(model)
        load(model, optimizer, f"{FOLDER}/{saved}")
        same(values_of(model, optimizer), truth(3))


def check_load_sharded_resumes(rank: int, world: int) -> None:
    """With fresh optimizers, whose groups are in another order."""
    for boundary in BOUNDARIES:
        model = sharded(9, boundary=boundary)
        optimizer = optimizer_of(model, flipped=True)
        flat_param.load_sharded(model, f"{FOLDER}/element", optimizer=optimizer)
        same(values_of(model, optimizer), truth(3))
        assert [group["lr"] for group in optimizer.param_groups] == [0.02, 0.01]


def check_copies_of_shards(rank: int, world: int) -> None:
    """HSDP saves each element once, and loads."""
    if world != 4:
        return
    options = {"mesh": init_device_mesh("cpu", (2, 2))}
    model = sharded(9, **options)
    optimizer = optimizer_of(model)
    flat_param.load_sharded(model, f"{FOLDER}/row", optimizer=optimizer)
    same(values_of(model, optimizer), truth(3))
    path = f"{FOLDER}/hybrid"
    dcp.save(state_of(model, optimizer), checkpoint_id=path)
    flat_param.save_sharded(model, f"{path}-ours", optimizer=optimizer)
    train(model, optimizer, 3, 5)
    expected = values_of(model, optimizer)
    for each in (path, f"{path}-ours"):
        other = sharded(7)
        fresh = optimizer_of(other)
        flat_param.load_sharded(other, each, optimizer=fresh)
        same(values_of(other, fresh), truth(3))
        train(other, fresh, 3, 5)
        same(values_of(other, fresh), expected)
    full = flat_param.full_state_dict(model, optimizer=optimizer, rank0_only=True)
    assert bool(full["model"]) == (rank == 0)


run = checks(globals(), "FOLDER")
