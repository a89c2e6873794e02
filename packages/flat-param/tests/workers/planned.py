"""What a step sends and keeps, counted, beside what was planned for it."""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest
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
    loss_of(model, share(ids, rank)).backward()  # the first step also asks who has what
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
        plan = planned(world, boundary=boundary, rank=rank)
        model = sharded(boundary=boundary)
        (ids,) = batches(world, 1)
        loss_of(model, share(ids, rank)).backward()
        assert model.comm_counts() == plan.collectives, boundary


def check_state_elsewhere(rank: int, world: int) -> None:
    """Bytes that are brought and put away by a step, and that files have; two buckets near."""
    for options in ({}, {"boundary": "tensor"}, {"boundary": "row"}):
        for numel in (40, 1 << 20):
            mine = {**options, "rank": rank}
            plan = planned(world, **mine, offload_bucket_numel=numel)
            kept, brought, put = offloaded_bytes(sharded(**options), numel)
            counted = flat_param.plan.StateElsewhere(kept, sum(brought))
            assert plan.elsewhere == counted, (options, numel, plan.elsewhere, counted)
            assert sum(put) == sum(brought)
            near = max(map(sum, pairwise([*brought, 0])), default=0)
            usual = planned(world, **mine).rank_bytes.optimizer
            assert near <= plan.rank_bytes.optimizer <= usual, (near, plan.rank_bytes)
            most = max(near, 2 * 8 * 15 * 7)  # two of the largest matrices, where these are near
            assert plan.rank_bytes.optimizer <= most + 3 * 8  # and the scalars, which stay


class Measured(torch.optim.AdamW):
    """Counts the bytes of each bucket's state when its step begins and ends."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.brought, self.put = list[int](), list[int]()

    def _bytes(self) -> int:
        params = [param for group in self.param_groups for param in group["params"]]
        values = [value for param in params for value in self.state.get(param, {}).values()]
        return sum(value.nbytes for value in values if value.dim())

    def step(self, closure: Any = None) -> Any:
        """Step a bucket between two counts."""
        self.brought.append(self._bytes())
        super().step(closure)
        self.put.append(self._bytes())


def offloaded_bytes(model: Any, numel: int) -> tuple[int, list[int], list[int]]:
    """In files; brought for each bucket of a second step, and put away."""
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer = Measured(model.parameters(), foreach=False)
    kept, from_file = list[int](), torch.from_file

    def mapping(path: str, *, size: int, **options: Any) -> Any:
        kept.append(size)
        return from_file(path, size=size, **options)

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        flat_param.offload_optimizer(optimizer, folder=folder, bucket_numel=numel)
        patch.setattr(torch, "from_file", mapping)
        optimizer.step()
        optimizer.brought, optimizer.put = [], []
        optimizer.step()
    return sum(kept), optimizer.brought, optimizer.put


if __name__ == "__main__":
    run_checks(globals())
