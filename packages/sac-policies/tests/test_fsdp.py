"""Regions of FSDP modules: what FSDP does inside them is not theirs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sac_policies import checkpoint, profile, save_all
from sac_policies._torch_compat import RANGE_END, RANGE_START
from sac_policies.eager._fsdp import Ranges

WORKER = """
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from sac_policies import checkpoint, recompute_all, save_all, save_every_nth, save_ops
from sac_policies.eager._tape import Region

mesh = init_device_mesh("cpu", (size,))
kept = set()
seen = Region.seen


def note_kept(region):
    found = seen(region)
    kept.update(str(op) for op in found.kept)
    return found


Region.seen = note_kept


class Block(nn.Module):
    def __init__(self, region):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.region = region

    def body(self, x):
        y = self.norm(x.view(-1, 2, 8)).view(-1, 8)
        return x + self.down(F.silu(self.up(y)))

    def forward(self, x):
        return self.region(self.body, x)


def plainly(function, x):
    return function(x)


def gradients(outside=plainly, inside=plainly, reshard=True):
    torch.manual_seed(0)
    blocks = nn.ModuleList(Block(inside) for _ in range(2))
    for block in blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    torch.manual_seed(rank + 1)
    found = []
    for _ in range(2):
        x = torch.randn(6, 8, requires_grad=True)
        y = x
        for block in blocks:
            y = outside(block, y)
        y.square().sum().backward()
        found += [x.grad, *(p.grad.full_tensor() for p in blocks.parameters())]
        blocks.zero_grad()
    return found


policies = {
    "all": save_all(),
    "products": save_ops("aten.addmm"),
    "views": save_every_nth("aten.view", n=2),
    "none": recompute_all(),
}
plain = gradients()
equal = {}
for name in policies:
    def region(function, x, name=name):
        return checkpoint(function, x, policy=policies[name])

    for reshard in (True, False):
        for place in ("outside", "inside"):
            own = gradients(**{place: region}, reshard=reshard)
            same = all(map(torch.equal, plain, own))
            equal[f"{name}, {place}, reshard {reshard}"] = same
found |= {"equal": equal, "kept": sorted(kept)}
"""


@pytest.mark.dist
def test_sharded_blocks_train_as_without_a_policy(ranks: list[dict[str, Any]]) -> None:
    """Region around the block or inside it, parameters freed or not: bitwise the same."""
    for rank in ranks:
        assert len(rank["equal"]) == 16
        assert [way for way, same in rank["equal"].items() if not same] == []


@pytest.mark.dist
def test_nothing_of_a_gather_is_kept(ranks: list[dict[str, Any]]) -> None:
    """Even when everything is saved: no collective, no buffer, only the block's operators."""
    own = {"native_layer_norm", "addmm", "silu", "add"}
    for rank in ranks:
        assert {op.split(".")[1] for op in rank["kept"]} == own
        assert all(op.startswith("aten.") for op in rank["kept"])


def _gathered(p: torch.Tensor) -> torch.Tensor:
    """A product, with work that FSDP marks as its own and work that a user marks."""
    with torch.profiler.record_function("FSDP::pre_forward"):
        p.detach().sin()
    with torch.profiler.record_function("mine"):
        return (p @ p).cos()


def test_marked_work_runs_and_is_not_counted(counting: Any) -> None:
    """Only ranges that FSDP opened are left out."""
    p = torch.ones(3, 3, requires_grad=True)
    out = checkpoint(_gathered, p, policy=save_all())
    with counting() as counts:
        out.sum().backward()
    assert (counts["aten.sin.default"], counts["aten.mm.default"]) == (1, 2)


def test_profile_leaves_marked_work_out() -> None:
    """A plan numbers the calls that regions number."""
    trace = profile(_gathered, torch.ones(3, 3, requires_grad=True))
    assert [op.name for op in trace.ops] == ["aten.mm.default", "aten.cos.default"]


def test_ranges_nest() -> None:
    """A user's range inside FSDP's does not end it; one that began before is not counted."""
    start, end = RANGE_START, RANGE_END
    ranges = Ranges()
    ranges.follow(end, (None,))
    states = []
    for op, name in [(start, "FSDP::x"), (start, "mine"), (end, None), (end, None)]:
        ranges.follow(op, (name,))
        states.append(ranges.inside)
    assert states == [True, True, True, False]
