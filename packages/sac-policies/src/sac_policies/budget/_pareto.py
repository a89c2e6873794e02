"""What memory buys: the plans of a trace that no other plan beats in both respects."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from .._errors import BudgetError, shown
from ..policies._budget_plan import BudgetPlan
from ..policies._checked import is_count
from ._solve import check_trace, solve
from ._trace import Trace

_MOST_POINTS = 10_000


class ParetoPoint(NamedTuple):
    """One plan.

    Attributes:
        bytes: kept between forward and backward.
        seconds: work that backward repeats; floating point operations for a trace in "flops".
        policy: the plan, for `checkpoint`.
    """

    bytes: int
    seconds: float
    policy: BudgetPlan


def pareto(trace: Trace, *, points: int = 33) -> list[ParetoPoint]:
    """Solve for evenly spaced budgets and return the plans none of which beats another.

    Args:
        trace: from `profile`.
        points: budgets to solve for, from the smallest to everything kept; 2 to 10,000.

    Returns:
        Points by rising bytes and strictly falling seconds.

    Raises:
        BudgetError: no trace, fewer than 2 points or more than 10,000.

    Example:
        >>> [point.bytes for point in pareto(Trace("ns", (), ()))]
        [0]
    """
    check_trace(trace, where="pareto")
    if not is_count(points) or not 2 <= points <= _MOST_POINTS:
        raise BudgetError(
            f"sac_policies.pareto: points {shown(points)} is not a number of budgets, but a front "
            f"has two ends and is solved point by point. Ask for 2 to {_MOST_POINTS}."
        )
    low, high = trace.fixed_bytes(), trace.total_bytes()
    budgets = (low + (high - low) * step // (points - 1) for step in range(points))
    plans = (solve(trace, budget) for budget in budgets)
    return _front(point_of(plan) for plan in plans if isinstance(plan, BudgetPlan))


def point_of(plan: BudgetPlan) -> ParetoPoint:
    """Return the plan with its two measures."""
    cost = plan.recompute_cost
    return ParetoPoint(plan.kept_bytes, cost / 1e9 if plan.unit == "ns" else float(cost), plan)


def _front(points: Iterable[ParetoPoint]) -> list[ParetoPoint]:
    front: list[ParetoPoint] = []
    for point in sorted(points, key=lambda point: point[:2]):
        if not front or point.seconds < front[-1].seconds:
            front.append(point)
    return front
