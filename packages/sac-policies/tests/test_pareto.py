"""Pareto fronts: the plans that no other plan beats."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from sac_policies import BudgetError, checkpoint, profile
from sac_policies.budget import (
    ParetoPoint,
    Trace,
    TracedOp,
    TracedPack,
    pareto,
)


@pytest.fixture(scope="module")
def front() -> list[ParetoPoint]:
    """The front of a chain of products of different sizes."""
    torch.manual_seed(0)
    sizes = [8, 64, 16, 48, 32, 24]
    weights = [torch.randn(a, b).div(8).requires_grad_() for a, b in pairwise(sizes)]

    def function(x: torch.Tensor) -> torch.Tensor:
        for weight in weights:
            x = F.silu(x @ weight)
        return x

    return pareto(profile(function, torch.randn(16, 8), unit="flops"))


def test_no_point_beats_another(front: list[ParetoPoint]) -> None:
    """More bytes always buy less work, strictly."""
    assert len(front) > 5
    assert all(a.bytes < b.bytes and a.seconds > b.seconds for a, b in pairwise(front))


def test_front_ends_where_nothing_is_repeated(front: list[ParetoPoint]) -> None:
    """The last point keeps all that saves work."""
    assert front[-1].seconds == 0
    assert [point.policy.kept_bytes for point in front] == [point.bytes for point in front]


def test_one_point_is_no_front(front: list[ParetoPoint]) -> None:
    """A front needs two ends."""
    trace = profile(torch.sin, torch.ones(2, requires_grad=True))
    with pytest.raises(BudgetError, match="points 1 is not a number of budgets"):
        pareto(trace, points=1)
    assert [point.seconds for point in pareto(trace, points=2)][-1:] == [0.0]


def _gated(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Two functions that save their results, and a product with one of them."""
    return torch.sigmoid(torch.tanh(x @ w) @ w) * x


def _ranked(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Two functions that save integers beside their results."""
    return torch.logcumsumexp(torch.logcumsumexp(x @ w, 0) @ w, 0)


@pytest.mark.parametrize("body", [_gated, _ranked])
def test_where_there_is_a_trade_there_are_several_points(body: Any) -> None:
    """From the least that can be kept; each takes the bytes and gives the gradients."""
    x, w = (torch.linspace(-1, 1, 64 * 64).view(64, 64).requires_grad_() for _ in "xw")
    trace = profile(body, x, w, unit="flops")
    found = pareto(trace)
    assert len(found) > 2
    assert found[0].bytes == 0
    assert found[-1].seconds == 0
    plain = torch.autograd.grad(body(x, w).sum(), (x, w))
    for point in found:
        out = checkpoint(body, x, w, policy=point.policy)
        assert all(map(torch.equal, torch.autograd.grad(out.sum(), (x, w)), plain))


def test_budgets_are_spread_from_what_is_fixed_to_everything() -> None:
    """With 100 of 700 bytes fixed, three points are solved for 100, 400 and 700, and not 500."""
    sizes = (100, 350, 250)
    ops = tuple(TracedOp("a", n, size, 9 * size, ()) for n, size in enumerate(sizes))
    packs = tuple(TracedPack("M" if n else "", n, 0, size) for n, size in enumerate(sizes))
    found = pareto(Trace("flops", ops, packs), points=3)
    assert [(point.bytes, point.seconds) for point in found] == [(100, 5400), (350, 3150), (700, 0)]
