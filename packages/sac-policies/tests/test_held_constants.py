"""What a replay reads that no node of the graph has is written down, as large as it is held."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sac_policies import BudgetPlan, profile, report, solve
from sac_policies.budget._solve import plan_of, spread

from ._recipe import bytes_kept, is_plain, leaf

ROWS, WIDTH = 128, 256
SIZE = 4 * ROWS * WIDTH
HALF = leaf(ROWS, WIDTH).detach()[: ROWS // 2]
ROW = HALF[0].clone()


def table() -> Tensor:
    """Half of a value, made in a forward."""
    return HALF * 2.0


def doubled(constant: Tensor) -> Tensor:
    """The same where it has all the rows."""
    return constant.expand(2, ROWS // 2, WIDTH).reshape(ROWS, WIDTH)


def added(x: Tensor) -> Tensor:
    """A sum with a constant for each half of the rows, and a mask of another."""
    y = x.view(2, ROWS // 2, WIDTH)
    y = (y.neg() + table()).sin()
    return y.masked_fill((table() > 0.0), 0.5).cos()


def shared(x: Tensor) -> Tensor:
    """Three values that are made of one constant."""
    y, constant = x.view(2, ROWS // 2, WIDTH), table()
    for _ in range(3):
        y = (y + constant).sin()
    return y


def behind(x: Tensor) -> Tensor:
    """A value that is made of another one, which is saved before it or after it."""
    y = (x.view(2, ROWS // 2, WIDTH) + table()).neg()
    late = y + 0.5
    return (y.sin() + late.cos()) * y.tanh()


def copied(x: Tensor) -> Tensor:
    """Small ones, of the region and of its caller: each sum has copies of its own."""
    row, own = ROW, HALF[1] * 3.0
    for _ in range(2):
        x = ((x + row).sin() + own).cos()
    return x


def there_anyway(x: Tensor) -> Tensor:
    """The caller's, and one that a product saves as well."""
    y, constant = x.view(2, ROWS // 2, WIDTH), table()
    return ((y + HALF).sin() + constant).cos() * constant


def detached(x: Tensor) -> Tensor:
    """A constant that lies in memory of a value with a gradient."""
    y = x.neg()
    half = y.detach()[: ROWS // 2]
    return (torch.cat([y, y]).view(4, ROWS // 2, WIDTH) + half).sin() * y.sin().mean()


def routed(x: Tensor) -> Tensor:
    """Indices that a call makes again of scores with a constant."""
    scores = x.view(2, ROWS // 2, WIDTH) + table()
    _, chosen = scores.topk(WIDTH // 2, dim=-1)
    return x.view(2, ROWS // 2, WIDTH).gather(-1, chosen).sin()


def embedded(x: Tensor) -> Tensor:
    """What is made again of a small value that is not: it is copied."""
    own = ROW[:16].cumprod(0)
    wave = torch.outer(own, ROW).repeat(4, 1).sin()
    return (x.view(2, ROWS // 2, WIDTH) * wave).sin()


FUNCTIONS = [added, shared, behind, copied, there_anyway, detached, routed, embedded]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_plan_keeps_what_it_says(function: Callable[..., Tensor]) -> None:
    """To the byte, in a forward that decides, that is written down, and that follows."""
    x = leaf(ROWS, WIDTH)
    trace = profile(function, x, unit="flops")
    low, high = trace.fixed_bytes(), trace.total_bytes()
    plans = [solve(trace, low + n * (high - low) // 4) for n in range(5)]
    plans += [plan_of(trace, [item], bound=item.cost, engine="recipe") for item in trace.items()]
    for plan in (*plans, spread(trace, 2), spread(trace, 3)):
        assert isinstance(plan, BudgetPlan)
        told = report(function, x, policy=plan)
        for _ in range(3):
            assert bytes_kept(function, x, policy=plan) == plan.kept_bytes
            assert plan.kept_bytes == told.held_bytes + told.guard_bytes
            assert is_plain(function, x, policy=plan)
