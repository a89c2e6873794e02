"""Find the plan with the least recomputation for a budget.

A value is kept or its operator runs again: a 0/1 knapsack over bytes and work. `_knapsack` solves
it in integers.
"""

from __future__ import annotations

from collections.abc import Sequence

from .._errors import BudgetError, shown
from ..policies._budget_plan import BudgetPlan, Infeasible
from ..policies._decisions import Decision
from ._knapsack import pack
from ._sizes import Budget, budget_bytes
from ._trace import Item, Trace


def solve(trace: Trace, budget: Budget) -> BudgetPlan | Infeasible:
    """Plan which values to keep so that backward recomputes as little as possible within `budget`.

    The budget is for bytes kept between forward and backward, counted exactly; use `plan_region`
    for a budget on the measured peak of a whole step.

    Args:
        trace: from `profile`.
        budget: bytes (int), a fraction of the bytes that can be kept (float), "6 GiB" or "50%".

    Returns:
        A policy for `checkpoint`, or an `Infeasible` with the smallest possible budget.

    Raises:
        BudgetError: the budget is negative, above 100%, or invalid.

    Example:
        >>> solve(Trace("ns", (), ()), "1 KiB").kept_bytes
        0
    """
    check_trace(trace, where="solve")
    allowed = budget_bytes(budget, total_bytes=trace.total_bytes())
    fixed, items = trace.fixed_bytes(), trace.items()
    if allowed < fixed:
        return Infeasible(allowed, fixed, "what cannot be made again, and report names")
    sizes, costs = [item.kept_bytes for item in items], [item.cost for item in items]
    packing = pack(sizes, costs, capacity=allowed - fixed)
    bound, kept = packing.bound, [items[n] for n in packing.taken]
    if slack := trace.slack_bytes:
        # Values that several values are recomputed from count as held, unless all are kept.
        bound = pack(sizes, costs, capacity=allowed - fixed + slack).bound
        if trace.total_bytes() <= allowed:
            kept = list(items)
    return plan_of(trace, kept, bound=bound)


def spread(trace: Trace, nth: int) -> BudgetPlan:
    """Plan to keep every `nth` value, so that no chain of replays is long.

    The choice depends only on their order, not on measured work.

    Args:
        trace: from `profile`.
        nth: at least 1, which keeps all.
    """
    items = trace.items()
    kept = items[nth - 1 :: nth]
    best = pack(
        [item.kept_bytes for item in items],
        [item.cost for item in items],
        capacity=sum(item.kept_bytes for item in kept) + trace.slack_bytes,
    )
    return plan_of(trace, kept, bound=best.bound)


def check_trace(trace: object, *, where: str) -> None:
    """Refuse objects that are not traces.

    Raises:
        BudgetError: with what is accepted.
    """
    if not isinstance(trace, Trace):
        raise BudgetError(
            f"sac_policies.{where}: trace {shown(trace)} is a {type(trace).__name__}, but a plan "
            "is made from a Trace. Pass what profile(function, *args) returns."
        )


def plan_of(trace: Trace, kept: Sequence[Item], *, bound: int) -> BudgetPlan:
    """Make a plan from a choice of items.

    Args:
        trace: the trace of the items.
        kept: items of `trace.items()` to keep.
        bound: upper bound of the saved work within the budget, in the trace's unit.
    """
    whole = sum(item.cost for item in trace.items())
    saved = {i for item in kept for i in item.ops}
    return BudgetPlan(
        choices=tuple(sorted((trace.ops[i].key, Decision.SAVE) for i in saved)),
        kept_bytes=trace.bytes_kept(saved),
        recompute_cost=whole - sum(item.cost for item in kept),
        bound_cost=whole - bound,
        unit=trace.unit,
    )
