"""The second opinion by HiGHS."""

from __future__ import annotations

import random
import sys
from types import SimpleNamespace

import pytest

from sac_policies import BudgetError, Infeasible, Trace, TracedOp, TracedPack, solve, solve_milp
from sac_policies.budget import _solve_milp as module


def random_trace(seed: int) -> Trace:
    """Forty saved products of spread sizes and costs."""
    r = random.Random(seed)
    sizes = [int(r.lognormvariate(18, 2)) for _ in range(40)]
    ops = tuple(
        TracedOp("aten.mm.default", i, size, int(r.lognormvariate(10, 2)), (), i)
        for i, size in enumerate(sizes)
    )
    packs = tuple(TracedPack("MmBackward0", i, 0, size) for i, size in enumerate(sizes))
    return Trace("ns", ops, packs)


@pytest.mark.parametrize("seed", range(10))
def test_optimum_is_within_budget_and_proved(seed: int) -> None:
    """HiGHS works in floats; what it returns is checked in ints, and is its set's (B10)."""
    pytest.importorskip("scipy", reason="the milp extra is not installed")
    trace = random_trace(seed)
    plan = solve_milp(trace, "40%")
    kept = {call for call, _ in plan.choices}
    assert plan.kept_bytes == sum(op.out_bytes for op in trace.ops if op.key in kept)
    assert plan.recompute_cost == sum(op.cost for op in trace.ops if op.key not in kept)
    assert plan.kept_bytes <= trace.total_bytes() * 2 // 5
    assert plan.gap == 0.0
    assert plan.recompute_cost == solve(random_trace(seed), "40%").recompute_cost


def test_infeasible_needs_no_solver() -> None:
    """Below the fixed bytes nothing is asked of scipy."""
    trace = Trace("ns", (TracedOp("aten.exp.default", 0, 9, 1, (), 0),), (TracedPack("", 0, 0, 9),))
    assert solve_milp(trace, 8) == Infeasible(8, 9)


def test_set_that_is_too_heavy_by_a_rounding_is_solved_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An answer over the budget tightens the constraint instead of being returned."""
    rooms: list[int] = []

    def milp(costs: list[int], *, constraints: int, **_: object) -> SimpleNamespace:
        rooms.append(constraints)
        both = constraints >= 10
        return SimpleNamespace(x=[1.0, float(both)], mip_dual_bound=-9.0, message="")

    fake = SimpleNamespace(
        milp=milp, LinearConstraint=lambda rows, ub: ub, Bounds=lambda low, high: None
    )
    monkeypatch.setattr(module, "_scipy", lambda: fake)
    found = module._pack([5, 6], [4, 5], capacity=10)
    assert rooms == [10, 9]
    assert (found.taken, found.weight, found.value, found.bound) == ((0,), 5, 4, 9)


def test_missing_scipy_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the extra the error names it and the way without."""
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(BudgetError, match=r"scipy is missing.*sac-policies\[milp\], or use solve"):
        solve_milp(random_trace(0), "40%")


def test_solver_without_answer_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure of HiGHS is named, never taken for a plan."""
    fake = SimpleNamespace(
        milp=lambda *a, **k: SimpleNamespace(x=None, message="time limit"),
        LinearConstraint=lambda rows, ub: ub,
        Bounds=lambda low, high: None,
    )
    monkeypatch.setattr(module, "_scipy", lambda: fake)
    with pytest.raises(BudgetError, match=r"40 items have no answer \(time limit\)"):
        solve_milp(random_trace(0), "40%")
