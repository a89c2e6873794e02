"""Train with every way and boundary beside one process."""

from __future__ import annotations

from typing import Any

import torch
from _harness import (
    WAYS,
    batches,
    distance,
    loss_of,
    mean_over_ranks,
    options_of,
    plain,
    planned_as,
    sharded,
    share,
    whole_state,
)
from torch import nn

import flat_param


def train(model: nn.Module, inputs: list[torch.Tensor]) -> list[float]:
    """SGD with momentum and clipping: linear in the gradient, so rounding stays rounding."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for ids in inputs:
        optimizer.zero_grad()
        loss = loss_of(model, ids)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    return losses


def measure(rank: int, world: int, way: str, boundary: Any) -> dict[str, Any]:
    """How far a sharded run is from the plain one, and what it communicated."""
    inputs = batches(world)
    reference = plain()
    expected = train(reference, inputs)
    model = sharded(boundary=boundary, **options_of(way))
    got = mean_over_ranks(train(model, [share(ids, rank) for ids in inputs]))
    calls = {kind: count.calls for kind, count in model.comm_counts().items()}
    units = flat_param.plan.unit_shapes(plain(), units=type(reference.blocks[0]))
    planned = flat_param.plan.plan_training(units, **planned_as(way, world), boundary=boundary)
    parts = [part for unit in model._flat_param.schedule.units for part in unit.parts]
    return {
        "loss_error": (torch.tensor(got) - torch.tensor(expected)).abs().max().item(),
        "param_error": distance(whole_state(model), whole_state(reference)),
        "unused": [param.grad is None for param in model.blocks[1].unused.parameters()],
        "calls": calls,
        "bytes": sum(part.shard.nbytes for part in parts),
        "planned_bytes": planned.params,
    }


def run(rank: int, world: int) -> dict[str, Any]:
    """Every way; other boundaries on an even number of ranks."""
    cases: dict[str, tuple[str, Any]] = {way: (way, "element") for way in WAYS}
    if world in (2, 4):
        blocks = flat_param.Blocks(5), flat_param.Blocks((4, 4))
        mixed = (
            flat_param.by_name({"*weight": "tensor"}, missing_ok=True),
            flat_param.by_name({"*bias": blocks[0]}, default="row", missing_ok=True),
        )
        for boundary in ("row", "tensor", *blocks, *mixed):
            cases[f"ZeRO-3 {boundary}"] = "ZeRO-3", boundary
    return {name: measure(rank, world, *case) for name, case in cases.items()}
