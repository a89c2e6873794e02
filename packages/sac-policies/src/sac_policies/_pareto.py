"""Pure: what memory buys: the plans of a trace that no other plan beats in both respects."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from ._budget_plan import BudgetPlan
from ._errors import BudgetError
from ._json import from_json, to_json
from ._solve import solve
from ._trace import Target, Trace


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


def pareto(trace: Trace, *, points: int = 33, engine: Target = "recipe") -> list[ParetoPoint]:
    """Solve for evenly spaced budgets and return the plans none of which beats another.

    Args:
        trace: from `profile`.
        points: budgets to solve for, from the smallest to everything kept; at least 2.
        engine: as for `solve`.

    Returns:
        Points by rising bytes and strictly falling seconds.

    Raises:
        BudgetError: fewer than 2 points.

    Example:
        >>> [point.bytes for point in pareto(Trace("ns", (), ()))]
        [0]
    """
    if points < 2:
        raise BudgetError(
            f"sac_policies.pareto: points {points} is too few, but a front has two ends. "
            "Ask for at least 2."
        )
    low, high = trace.fixed_bytes(engine), trace.total_bytes(engine)
    budgets = (low + (high - low) * step // (points - 1) for step in range(points))
    plans = (solve(trace, budget, engine=engine) for budget in budgets)
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


def pareto_to_json(points: Sequence[ParetoPoint]) -> str:
    """Write a front as JSON text; `pareto_from_json` reads it back."""
    rows = [[p.bytes, p.seconds, json.loads(to_json(p.policy))] for p in points]
    return json.dumps(rows)


def pareto_from_json(text: str) -> list[ParetoPoint]:
    """Read what `pareto_to_json` wrote.

    Raises:
        BudgetError: a point holds no plan.

    Example:
        >>> front = pareto(Trace("ns", (), ()))
        >>> pareto_from_json(pareto_to_json(front)) == front
        True
    """
    rows: list[Any] = json.loads(text)
    return [ParetoPoint(size, cost, _plan(json.dumps(policy))) for size, cost, policy in rows]


def _plan(text: str) -> BudgetPlan:
    plan = from_json(text)
    if not isinstance(plan, BudgetPlan):
        raise BudgetError(
            f"sac_policies.pareto_from_json: policy {type(plan).__name__} is read, but a point "
            "holds a BudgetPlan. Pass what pareto_to_json wrote."
        )
    return plan


def plot_pareto(points: Sequence[ParetoPoint], path: str) -> None:
    """Draw a front to a file; needs matplotlib.

    Args:
        points: from `pareto`.
        path: where to; its ending names the format.

    Raises:
        BudgetError: matplotlib is not installed.
    """
    try:
        figure = import_module("matplotlib.figure").Figure(figsize=(6, 4))
    except ImportError:
        raise BudgetError(
            "sac_policies.plot_pareto: module matplotlib is missing, but it draws the plot. "
            "Install sac-policies[plot], or read the points themselves."
        ) from None
    axes = figure.subplots()
    axes.step([p.bytes / 2**20 for p in points], [p.seconds for p in points], where="post")
    axes.set_xlabel("kept between forward and backward (MiB)")
    axes.set_ylabel(f"work repeated in backward ({_unit(points)})")
    figure.savefig(path)


def _unit(points: Sequence[ParetoPoint]) -> str:
    return "s" if points and points[0].policy.unit == "ns" else "FLOP"
