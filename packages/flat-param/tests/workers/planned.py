"""What a step sends and keeps, counted, beside what was planned for it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from _harness import (
    WAYS,
    Block,
    batches,
    loss_of,
    options_of,
    plain,
    planned_as,
    run_checks,
    sharded,
    share,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import flat_param

F32 = torch.float32
BF16 = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)


def planned(world_size: int, **options: Any) -> flat_param.plan.TrainingPlan:
    """For the harness's model."""
    units = flat_param.plan.unit_shapes(plain(), units=Block)
    return flat_param.plan.plan_training(units, world_size=world_size, **options)


def compare(
    model: Any, plan: flat_param.plan.TrainingPlan, passes: int, rank: int, world: int
) -> None:
    """A step of so many passes, all but the last inside `no_sync`."""
    (ids,) = batches(world, 1)
    loss_of(model, share(ids, rank)).backward()  # the first step also exchanges pieces' owners
    model.zero_grad()
    model.comm_counts()
    for index in range(passes):
        with nullcontext() if index == passes - 1 else model.no_sync():
            loss_of(model, share(ids, rank)).backward()
    counted = model.comm_counts()
    assert counted == plan.collectives, (counted, plan.collectives)
    assert sum(part.shard.nbytes for part in parts_of(model)) == plan.rank_bytes.params


def parts_of(model: Any) -> list[Any]:
    """Of all units."""
    return [part for unit in model._flat_param.schedule.units for part in unit.parts]


def check_every_strategy(rank: int, world: int) -> None:
    """One pass, and three of which two are inside `no_sync`."""
    for way in WAYS:
        for passes in (1, 3):
            model = sharded(**options_of(way))
            plan = planned(**planned_as(way, world), microbatches=passes)
            compare(model, plan, passes, rank, world)


def check_mixed_precision(rank: int, world: int) -> None:
    """Gathered in two bytes, summed in four."""
    plan = planned(world, mp_policy=BF16, microbatches=2)
    compare(sharded(mp_policy=BF16), plan, 2, rank, world)


def check_copies(rank: int, world: int) -> None:
    """Every way to divide the ranks into copies of more than one part."""
    for copies in (copies for copies in (2, 4) if world // copies > 1):
        mesh = init_device_mesh("cpu", (copies, world // copies))
        for passes in (1, 2):
            options = {"replicas": copies, "microbatches": passes}
            plan = planned(world // copies, **options)
            model = sharded(mesh=mesh)
            compare(model, plan, passes, rank, world)


def check_boundaries(rank: int, world: int) -> None:
    """Ranges that differ in length."""
    for boundary in ("row", "tensor", flat_param.Blocks(5)):
        plan = planned(world, boundary=boundary)
        model = sharded(boundary=boundary)
        (ids,) = batches(world, 1)
        loss_of(model, share(ids, rank)).backward()
        assert model.comm_counts() == plan.collectives, boundary


if __name__ == "__main__":
    run_checks(globals())
