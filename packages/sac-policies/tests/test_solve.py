"""Solved plans are within budget and monotone, and engines follow them to the byte."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from sac_policies import checkpoint, profile, solve
from sac_policies.budget import BudgetPlan, Trace, TracedOp, TracedPack


def random_trace(seed: int, n: int = 20, held: float = 0.2) -> Trace:
    """Operators of various sizes and costs, each saved once; some are always held."""
    r = random.Random(seed)
    ops, packs = [], []
    for i in range(n):
        size = int(r.lognormvariate(10, 2)) + 1
        ops.append(TracedOp("aten.mm.default", i, size, int(r.lognormvariate(8, 2)), ()))
        packs.append(TracedPack("" if r.random() < held else "aten.mm.default", i, 0, size))
    return Trace("ns", tuple(ops), tuple(packs))


def test_whole_budget_keeps_everything_that_saves_work() -> None:
    """With a budget of 100 %, nothing is recomputed."""
    plan = solve(random_trace(0), "100%")
    assert plan.recompute_cost == 0


def network() -> tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor]:
    """A norm, a gated matmul and its input."""
    torch.manual_seed(0)
    gate, up, down = (torch.randn(32, 32).div(8).requires_grad_() for _ in range(3))

    def function(x: torch.Tensor) -> torch.Tensor:
        y = F.layer_norm(x, (32,))
        y = (F.silu(y @ gate) * (y @ up)) @ down
        return (y.view(8, 2, 32).transpose(0, 1) * 2).exp().mean()

    return function, torch.randn(16, 32, requires_grad=True)


def written() -> tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor]:
    """Writes to saved tensors, draws a mask, uses indices and casts."""
    torch.manual_seed(0)
    up, down = torch.randn(64, 128, requires_grad=True), torch.randn(128, 64, requires_grad=True)

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x @ up
        z = y + 1
        y.mul_(0.5).relu_()
        z = F.dropout(z.sin() * y, 0.2)
        best, places = z.topk(16, dim=-1)
        with torch.autocast("cpu", torch.bfloat16):
            out = (z + z.gather(1, places).sum(-1, keepdim=True)) @ down
        return (out.float().exp().clamp(max=2.0) * best.mean(-1, keepdim=True)).sum()

    return function, torch.randn(64, 64, requires_grad=True)


def penalized() -> tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor]:
    """Takes a gradient inside, whose own gradient is needed."""
    torch.manual_seed(0)
    up, down = torch.randn(32, 64, requires_grad=True), torch.randn(64, 1, requires_grad=True)

    def function(x: torch.Tensor) -> torch.Tensor:
        y = (torch.tanh(x @ up).sin() @ down).sum()
        (slope,) = torch.autograd.grad(y, x, create_graph=True)
        return y + slope.square().sum()

    return function, torch.randn(16, 32, requires_grad=True)


def held_bytes(function: Callable[..., torch.Tensor], x: torch.Tensor, plan: BudgetPlan) -> int:
    """Bytes of storages packed by hooks around the region, without leaves."""
    sizes: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if not (tensor.is_leaf and tensor.requires_grad):
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = checkpoint(function, x, policy=plan)
    del out
    weights = [cell.cell_contents for cell in function.__closure__ or ()]
    leaves = {each.untyped_storage().data_ptr() for each in (x, *weights)}
    return sum(size for address, size in sizes.items() if address not in leaves)


@pytest.mark.parametrize("make", [network, written, penalized])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 1.0])
def test_region_keeps_exactly_the_bytes_of_the_plan(make: Any, share: float) -> None:
    """Hooks around the region pack exactly `kept_bytes`."""
    function, x = make()
    trace = profile(function, x)
    budget = trace.fixed_bytes() + int(share * (trace.total_bytes() - trace.fixed_bytes()))
    plan = solve(trace, budget)
    assert held_bytes(function, x, plan) == plan.kept_bytes <= budget
