"""Optimizers of sharded modules whose state is in files; one check per claim."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from _harness import batches, loss_of, same_bits, sharded, share
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy

import flat_param

FOLDER = Path()
KINDS: tuple[tuple[Any, dict[str, Any]], ...] = (
    (torch.optim.AdamW, {"lr": 0.01}),
    (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.Adagrad, {"lr": 0.1}),
)


def made(kind: Any, options: dict[str, Any], *, offloaded: bool, **unit: Any) -> tuple[Any, Any]:
    """A sharded model and its optimizer."""
    model = sharded(**unit)
    optimizer = kind(model.parameters(), **options)
    if offloaded:
        flat_param.offload_optimizer(optimizer, folder=FOLDER, bucket_numel=40)
    return model, optimizer


def train(model: nn.Module, optimizer: Any, ids: list[Tensor], rank: int) -> None:
    """Steps with clipping."""
    for each in ids:
        optimizer.zero_grad()
        loss_of(model, share(each, rank)).backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()


def check_training_is_that_with_state_at_hand(rank: int, world: int) -> None:
    """For each optimizer, boundary and where the shards are; whole states are equal bit by bit."""
    in_memory = {"reshard_after_forward": False, "offload_policy": CPUOffloadPolicy()}
    units = ({}, {"boundary": "tensor"}, in_memory)
    for kind, options in KINDS:
        for unit in units:
            found = []
            for offloaded in (False, True):
                model, optimizer = made(kind, options, offloaded=offloaded, **unit)
                train(model, optimizer, batches(world, 4), rank)
                found.append(flat_param.full_state_dict(model, optimizer=optimizer))
            same_bits(*found, kind, options, unit)


def check_load_that_fails_elsewhere_leaves_state(rank: int, world: int) -> None:
    """Every rank has the parameters and the state that it had."""
    kind, options = KINDS[0]
    model, optimizer = made(kind, options, offloaded=True)
    train(model, optimizer, batches(world, 2), rank)
    path = FOLDER / "whole"
    flat_param.save_sharded(model, path, optimizer=optimizer)
    train(model, optimizer, batches(world, 2), rank)
    before = flat_param.full_state_dict(model, optimizer=optimizer)
    before = {"model": before["model"], "optim": {**before["optim"]}}
    load = type(optimizer).load_state_dict
    if rank == 1:

        def fail(*_: Any) -> None:
            raise flat_param.StateError("no room")

        type(optimizer).load_state_dict = fail
    with pytest.raises(flat_param.FlatParamError):
        flat_param.load_sharded(model, path, optimizer=optimizer)
    type(optimizer).load_state_dict = load
    same_bits(flat_param.full_state_dict(model, optimizer=optimizer), before)
    train(model, optimizer, batches(world, 1), rank)
