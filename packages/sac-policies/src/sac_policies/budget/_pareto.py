"""What memory buys: the plans of a trace that no other plan beats in both respects."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import NamedTuple

from .._errors import BudgetError, shown, shown_text
from ..policies._budget_plan import BudgetPlan
from ..policies._checked import conforms, is_count
from ..policies._json import load, policy_of, to_json
from ..policies._plans import Backend
from ._sizes import Budget
from ._solve import check_backend, solve
from ._trace import Trace

_MOST_POINTS = 10_000


class ParetoPoint(NamedTuple):
    """One plan.

    Attributes:
        bytes: kept between forward and backward.
        seconds: work that backward repeats, and waits for copies; floating point operations for a
            trace in "flops".
        policy: the plan, for `checkpoint`.
    """

    bytes: int
    seconds: float
    policy: BudgetPlan


def pareto(
    trace: Trace,
    *,
    points: int = 33,
    backend: Backend = "eager",
    host_bandwidth: Budget | None = None,
    regions: int = 1,
) -> list[ParetoPoint]:
    """Solve for evenly spaced budgets and return the plans none of which beats another.

    Args:
        trace: from `profile`.
        points: budgets to solve for, from the smallest to everything kept; 2 to 10,000.
        backend: as for `solve`.
        host_bandwidth: as for `solve`.
        regions: as for `solve`.

    Returns:
        Points by rising bytes and strictly falling seconds.

    Raises:
        BudgetError: no trace, an unknown backend, fewer than 2 points or more than 10,000.

    Example:
        >>> [point.bytes for point in pareto(Trace("ns", (), ()))]
        [0]
    """
    check_backend(trace, backend, where="pareto")
    if not is_count(points) or not 2 <= points <= _MOST_POINTS:
        raise BudgetError(
            f"sac_policies.pareto: points {shown(points)} is not a number of budgets, but a front "
            f"has two ends and is solved point by point. Ask for 2 to {_MOST_POINTS}."
        )
    low, high = trace.fixed_bytes(backend), trace.total_bytes(backend)
    budgets = (low + (high - low) * step // (points - 1) for step in range(points))
    plans = (
        solve(trace, b, backend=backend, host_bandwidth=host_bandwidth, regions=regions)
        for b in budgets
    )
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
    """Write a front as JSON text; `pareto_from_json` reads it back.

    Raises:
        BudgetError: not a list of points.
    """
    _check_points(points, where="pareto_to_json")
    rows = [[p.bytes, p.seconds, json.loads(to_json(p.policy))] for p in points]
    return json.dumps(rows)


def _check_points(points: object, *, where: str) -> None:
    listed = isinstance(points, (list, tuple)) and all(isinstance(p, ParetoPoint) for p in points)
    if not listed:
        raise BudgetError(
            f"sac_policies.{where}: points {shown(points)} are a {type(points).__name__}, but a "
            "front is a list of ParetoPoint. Pass what pareto(trace) returns."
        )


def pareto_from_json(text: str) -> list[ParetoPoint]:
    """Read what `pareto_to_json` wrote.

    Raises:
        BudgetError: the text is not such a front.

    Example:
        >>> front = pareto(Trace("ns", (), ()))
        >>> pareto_from_json(pareto_to_json(front)) == front
        True
    """
    try:
        return [_point(row) for row in _list(load(text))]
    except Exception as error:  # whatever a damaged text leads to
        raise BudgetError(
            f"sac_policies.pareto_from_json: text cannot be read ({shown_text(str(error))}), but "
            "a front is a list of bytes, seconds and plan. Pass what pareto_to_json wrote."
        ) from error


def _list(rows: object) -> list[object]:
    if not isinstance(rows, list):
        raise BudgetError(f"it holds a {type(rows).__name__}")
    return rows


def _point(row: object) -> ParetoPoint:
    size, cost, policy = _list(row)
    if not (is_count(size) and conforms(cost, float)):
        raise BudgetError(f"a point has {shown(size)} bytes and {shown(cost)} seconds")
    plan = policy_of(policy)
    if not isinstance(plan, BudgetPlan):
        raise BudgetError(f"a point holds a {type(plan).__name__} and no BudgetPlan")
    found = point_of(plan)
    if (size, cost) != found[:2]:
        raise BudgetError(f"a point has {size} bytes and {cost} seconds, its plan {found[:2]}")
    return found


def plot_pareto(
    points: Sequence[ParetoPoint],
    path: str | os.PathLike[str],
    *,
    chosen: BudgetPlan | None = None,
    title: str = "What memory buys",
) -> None:
    """Draw a front to a file; needs matplotlib.

    Args:
        points: from `pareto`.
        path: where to; its ending names the format.
        chosen: the plan that is used, from `solve`; it gets a mark and its bytes.
        title: above the plot.

    Raises:
        BudgetError: not a list of points, a path or a plan; or matplotlib is not installed.
    """
    _check_points(points, where="plot_pareto")
    if not isinstance(path, (str, os.PathLike)):
        raise BudgetError(
            f"sac_policies.plot_pareto: path {shown(path)} is a {type(path).__name__}, but a plot "
            "is written to a file. Pass for example 'front.svg'."
        )
    if chosen is not None and not isinstance(chosen, BudgetPlan):
        raise BudgetError(
            f"sac_policies.plot_pareto: chosen {shown(chosen)} is a {type(chosen).__name__}, but "
            "only a plan has bytes to be marked at. Pass what solve(trace, budget) returns."
        )
    try:
        figure = import_module("matplotlib.figure").Figure(figsize=(6, 4), layout="constrained")
    except ImportError:
        raise BudgetError(
            "sac_policies.plot_pareto: module matplotlib is missing, but it draws the plot. "
            "Install sac-policies[plot], or read the points themselves."
        ) from None
    axes = figure.subplots()
    axes.step([p.bytes / 2**20 for p in points], [p.seconds for p in points], where="post")
    axes.set_xlabel("kept between forward and backward (MiB)")
    axes.set_ylabel(f"work repeated in backward ({_unit(points)})")
    axes.set_title(title)
    if chosen is not None:
        point = point_of(chosen)
        size = point.bytes / 2**20
        axes.plot([size], [point.seconds], "o", label=f"chosen: {size:.2f} MiB")
        axes.legend()
    figure.savefig(path)


def _unit(points: Sequence[ParetoPoint]) -> str:
    return "s" if points and points[0].policy.unit == "ns" else "FLOP"
