"""Random programs, each run several times and changed now and then: gradients stay plain."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from sac_policies import MATMULS, recompute_all, save_ops

from ._recipe import bytes_kept, leaf, run
from .test_planned_steps import anew, plan_of, stepped
from .test_planned_steps import shape_of as shape_under

PRODUCTS = save_ops(MATMULS)

LINKS: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    lambda y, w: y @ w,
    lambda y, w: y.sin() * y,
    lambda y, w: (y @ w).relu_(),
    lambda y, w: F.dropout(y, 0.3),
    lambda y, w: y.t(),
    lambda y, w: F.layer_norm(y, (8,), w[0], w[1]),
    lambda y, w: y.reshape(4, 16)[:, :8].repeat(2, 1),
    lambda y, w: y.softmax(-1) + y.tanh(),
    lambda y, w: F.silu(y @ w) * (y @ w.t()),
    lambda y, w: y.exp().log1p() if y.sum() > 0 else y.cos(),
)


@pytest.mark.filterwarnings("ignore::sac_policies.UnmatchedEntryWarning")
@pytest.mark.parametrize("seed", range(150))
def test_programs_that_change_now_and_then(seed: int) -> None:
    """Each forward has gradients as without checkpointing, bit by bit, whoever follows."""
    rng = random.Random(seed)
    program = [rng.choice(LINKS) for _ in range(rng.randrange(2, 7))]
    w = leaf(8, 8)
    policy = rng.choice([PRODUCTS, recompute_all(), save_ops("aten.silu", "aten.sin")])

    def function(y: Tensor) -> Tensor:
        for link in program:
            y = link(y, w)
        return y

    for turn in range(8):
        if turn > 3 and rng.random() < 0.5:
            program[rng.randrange(len(program))] = rng.choice(LINKS)
        if turn > 3 and rng.random() < 0.2:
            w.requires_grad_(not w.requires_grad)
        x = (torch.rand(8, 8) - 0.5).requires_grad_()
        leaves = [each for each in (x, w) if each.requires_grad]
        torch.manual_seed(turn)
        expected = torch.autograd.grad(function(x).sum(), leaves, allow_unused=True)
        torch.manual_seed(turn)
        out = run(function, x, policy=policy)
        found = torch.autograd.grad(out.sum(), leaves, allow_unused=True)
        for one, other in zip(expected, found, strict=True):
            if one is None or other is None:
                assert one is other
            else:  # as bits: what is no number equals itself
                assert torch.equal(one.view(torch.int32), other.view(torch.int32))


@pytest.mark.filterwarnings("ignore::sac_policies.UnmatchedEntryWarning")
@pytest.mark.parametrize("seed", range(100))
def test_random_programs_under_plans(seed: int) -> None:
    """Changed now and then: gradients bit by bit, and bytes as without steps."""
    rng = random.Random(seed)
    program = [rng.choice(LINKS) for _ in range(rng.randrange(2, 7))]
    w, x = leaf(8, 8), leaf(8, 8)

    def function(y: Tensor) -> Tensor:
        torch.manual_seed(0)
        for link in program:
            y = link(y, w)
        return y

    plan = plan_of(function, x, rng.choice((0.0, 0.2, 0.5, 0.8)), sees=rng.random() < 0.5)
    for turn in range(7):
        if turn > 3 and rng.random() < 0.6:
            program[rng.randrange(len(program))] = rng.choice(LINKS)
        expected = torch.autograd.grad(function(x).sum(), (x, w), allow_unused=True)
        out = run(function, x, policy=plan)
        found = torch.autograd.grad(out.sum(), (x, w), allow_unused=True)
        for one, other in zip(expected, found, strict=True):
            if one is None or other is None:
                assert one is other
            else:  # as bits: what is no number equals itself
                assert torch.equal(one.view(torch.int32), other.view(torch.int32))
        if turn == 3:
            assert shape_under(plan, function, x).followed == 2
        if turn > 3:
            kept = bytes_kept(function, x, policy=anew(plan))
            assert bytes_kept(function, x, policy=plan) == kept
            assert stepped(function, x, plan)[0] == stepped(function, x, anew(plan))[0]
