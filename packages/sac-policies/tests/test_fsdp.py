"""Regions of FSDP modules: FSDP gathers and frees parameters inside and around them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from sac_policies import (
    MATMULS,
    MutationError,
    Policy,
    checkpoint,
    profile,
    recompute_all,
    save_all,
    save_ops,
)
from sac_policies._torch_compat import is_freed
from sac_policies.eager._fingerprints import Fingerprint

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
    kept.update(str(op) for op, each in region.table.recorders.items() if each.keeps)
    return seen(region)


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
    """Bit-identical with the region around the block or inside it, resharded or not."""
    for rank in ranks:
        assert len(rank["equal"]) == 16
        assert [way for way, same in rank["equal"].items() if not same] == []


@pytest.mark.dist
def test_nothing_of_a_gather_is_kept(ranks: list[dict[str, Any]]) -> None:
    """With everything saved: no collective, no buffer, only the block's operators."""
    own = {"native_layer_norm", "addmm", "silu", "add"}
    for rank in ranks:
        assert {op.split(".")[1] for op in rank["kept"]} == own
        assert all(op.startswith("aten.") for op in rank["kept"])


def _gathered(p: torch.Tensor) -> torch.Tensor:
    """A matmul, with work in nested ranges of FSDP's and in a range of the user's."""
    with torch.profiler.record_function("FSDP::pre_forward"):
        with torch.profiler.record_function("inside"):
            p.detach().tan()
        p.detach().sin()
    with torch.profiler.record_function("mine"):
        return (p @ p).cos()


def test_marked_work_runs_and_is_not_counted(counting: Any) -> None:
    """Only work in FSDP's ranges is not counted."""
    p = torch.ones(3, 3, requires_grad=True)
    out = checkpoint(_gathered, p, policy=save_all())
    with counting() as counts:
        out.sum().backward()
    assert (counts["aten.sin.default"], counts["aten.mm.default"]) == (1, 2)


def test_profile_leaves_marked_work_out() -> None:
    """A plan and a region number the same calls."""
    trace = profile(_gathered, torch.ones(3, 3, requires_grad=True))
    assert [op.name for op in trace.ops] == ["aten.mm.default", "aten.cos.default"]


@pytest.mark.parametrize("numel", [8, 9000])
def test_fingerprint_does_not_read_freed_memory(numel: int) -> None:
    """Neither for a small tensor nor for a large one."""
    tensor = torch.randn(2, numel)[1]
    fingerprint = Fingerprint(tensor)
    fingerprint.check(tensor, MutationError)
    tensor.untyped_storage().resize_(0)
    assert is_freed(tensor)
    with pytest.raises(MutationError):
        fingerprint.check(tensor, MutationError)


def test_empty_tensor_is_not_freed() -> None:
    """It has no elements to free."""
    assert not is_freed(torch.empty(0, 3))
    assert not is_freed(torch.ones(3))


class Block(nn.Module):
    """If its second layer is sharded alone, it is gathered inside the region."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Backward of the last layer reads the output of the second one."""
        a, b = self.up(self.norm(x)).chunk(2, -1)
        return x + self.down(torch.cat([a * b, b], -1))


class Region(nn.Module):
    """A block under a policy."""

    def __init__(self, block: Block, policy: Policy) -> None:
        super().__init__()
        self.block, self.policy = block, policy

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run it."""
        return checkpoint(self.block, x, policy=self.policy)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("policy", [recompute_all(), save_ops(MATMULS)], ids=["nothing", "matmuls"])
def test_unit_inside_a_region_is_freed_before_backward_reads_it(policy: Policy) -> None:
    """Values computed from its parameters are held; gradients are plain."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        blocks, x = [Block(), Block()], torch.randn(4, 8, 32)
        plain = nn.Sequential(*copy.deepcopy(blocks))
        plain(x).sum().backward()
        model = nn.Sequential(*(Region(block, policy) for block in blocks))
        for block, region in zip(blocks, model, strict=True):
            fully_shard(block.up)
            fully_shard(region)
        fully_shard(model)
        for _ in range(2):
            model.zero_grad()
            model(x).sum().backward()
        found = [p.grad.full_tensor() for p in model.parameters()]
        assert all(map(torch.equal, found, [p.grad for p in plain.parameters()]))
    finally:
        dist.destroy_process_group()
