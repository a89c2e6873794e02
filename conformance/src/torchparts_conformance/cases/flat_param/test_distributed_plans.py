"""What is planned for a step, beside what a step does, on four ranks."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from torchparts_conformance import requirement
from torchparts_conformance.cases.flat_param._sharded import (
    batch,
    loss_of,
    mine,
    plain,
    sharded,
)

_COPIES, _PASSES = 2, 3


def _counted_and_planned(part: Any, rank: int, world_size: int) -> list[Any]:
    ways = world_size // _COPIES
    mesh = init_device_mesh("cpu", (_COPIES, ways))
    model = sharded(part, mesh=mesh)
    inputs = mine(batch(world_size), rank)
    loss_of(model, inputs).backward()
    model.zero_grad()
    model.comm_counts()
    for index in range(_PASSES):
        with nullcontext() if index == _PASSES - 1 else model.no_sync():
            loss_of(model, inputs).backward()
    plan = part.plan_training(
        part.unit_shapes(plain(), units=nn.Sequential),
        world_size=ways,
        replicas=_COPIES,
        microbatches=_PASSES,
    )
    found = (model.comm_counts(), plan.collectives)
    return [{kind: [c.calls, c.wire_bytes] for kind, c in each.items()} for each in found]


@requirement(
    "FP-233",
    level="MUST",
    text=(
        "`plan_training` MUST say the calls and bytes sent of a step as they are counted, also "
        "for copies of shards and for several microbatches of which the last one sums."
    ),
    rationale=(
        "a run of thousands of ranks is planned before there are any; a plan that differs from "
        "what is counted on four is worth nothing on 16,384"
    ),
    since="0.1.0",
    profile="distributed",
    devices=("cpu",),
)
def test_plan_of_copies_and_microbatches_is_what_is_counted(part, ranks):
    """Two copies of two parts, three passes of which the last one sums."""
    for counted, planned in ranks(4, _counted_and_planned):
        assert counted == planned
        assert counted["all_gather"][0] > 0
