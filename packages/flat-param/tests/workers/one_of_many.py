"""The program of the first of thousands of ranks, beside its plan.

Started as `python one_of_many.py <world> <way>...`. In torch's fake process group every
collective is a call that gives something back at once; nothing is sent.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from _harness import options_of, planned_as
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import flat_param


def model() -> nn.Module:
    """Odd sizes, so that thousands of ranks have padding, and a frozen layer."""
    layers = nn.Sequential(*(nn.Linear(67, 67) for _ in range(3)), nn.Linear(67, 5))
    layers[1].requires_grad_(False)
    return layers


def shown(
    collectives: dict[str, flat_param.plan.CommCount], params: int, grads: int
) -> dict[str, Any]:
    """As JSON has it."""
    counts = {kind: [c.calls, c.wire_bytes] for kind, c in collectives.items()}
    return {"collectives": counts, "params": params, "grads": grads}


def measured(world: str, way: str) -> list[dict[str, Any]]:
    """Two passes of one step, the first inside `no_sync`."""
    units = flat_param.plan.unit_shapes(model(), units=nn.Linear)
    plan = flat_param.plan.plan_training(units, **planned_as(way, int(world)), microbatches=2)
    layers = model()
    for layer in layers:
        flat_param.fully_shard(layer, **options_of(way))
    sharded = flat_param.fully_shard(layers, **options_of(way))
    sharded.comm_counts()
    with sharded.no_sync():
        sharded(torch.ones(2, 67)).sum().backward()
    sharded(torch.ones(2, 67)).sum().backward()
    parts = [part for unit in sharded._flat_param.schedule.units for part in unit.parts]
    trained = [part for part in parts if part.segment.trainable]
    counted = shown(
        sharded.comm_counts(),
        sum(part.shard.nbytes for part in parts),
        sum(part.shard.nbytes for part in trained),
    )
    planned = shown(plan.collectives, plan.rank_bytes.params, plan.rank_bytes.grads)
    return [counted, planned]


def main(world: str, *ways: str) -> None:
    """Every way in one group."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=int(world))
    print(json.dumps([measured(world, way) for way in ways]))


if __name__ == "__main__":
    main(*sys.argv[1:])
