"""Torch: the exact optimum by scipy's HiGHS, as a proof of how good a plan is.

Not needed to plan: `solve` proves its own optimum nearly always. This is a second opinion from
a solver that shares no code with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from .._errors import BudgetError
from ..policies._budget_plan import BudgetPlan, Infeasible
from ..policies._plans import Target
from ._knapsack import Packing
from ._sizes import Budget
from ._solve import solve_with
from ._trace import Trace


def solve_milp(
    trace: Trace, budget: Budget, *, engine: Target = "recipe"
) -> BudgetPlan | Infeasible:
    """As `solve`, by a mixed integer program; needs scipy.

    Raises:
        BudgetError: scipy is not installed, or HiGHS finds no solution.

    Example:
        >>> from sac_policies import Trace
        >>> solve_milp(Trace("ns", (), ()), "1 KiB").gap
        0.0
    """
    return solve_with(_pack, trace, budget, engine=engine)


def _pack(weights: Sequence[int], values: Sequence[int], *, capacity: int) -> Packing:
    """Maximise the value of whole items; HiGHS works in floats, so check in ints afterwards."""
    if not weights:
        return Packing((), 0, 0, 0)
    optimize = _scipy()
    room, bound = capacity, -1
    while True:
        answer = optimize.milp(
            [-value for value in values],
            constraints=optimize.LinearConstraint([list(weights)], ub=room),
            bounds=optimize.Bounds(0, 1),
            integrality=[1] * len(weights),
            options={"mip_rel_gap": 0.0},
        )
        if answer.x is None:
            raise BudgetError(
                f"sac_policies.solve_milp: {len(weights)} items have no answer "
                f"({answer.message}), but keeping nothing always fits. Use solve."
            )
        if bound < 0:
            bound = math.ceil(-answer.mip_dual_bound)
        taken = tuple(i for i, share in enumerate(answer.x) if share > 0.5)
        over = sum(weights[i] for i in taken) - capacity
        if over <= 0:
            value = sum(values[i] for i in taken)
            return Packing(taken, over + capacity, value, max(value, bound))
        # Tolerances let a set through that is too heavy by a rounding error.
        room -= over


def _scipy() -> Any:
    try:
        return import_module("scipy.optimize")
    except ImportError:
        raise BudgetError(
            "sac_policies.solve_milp: module scipy is missing, but HiGHS comes with it. Install "
            "sac-policies[milp], or use solve, which needs nothing."
        ) from None
