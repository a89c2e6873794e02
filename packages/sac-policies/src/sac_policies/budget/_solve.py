"""The best plan for a budget.

A value is kept or its operator runs again: a 0/1 knapsack over bytes and work. `_knapsack` solves
it in integers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import get_args

from .._errors import BudgetError, shown
from ..policies._budget_plan import BudgetPlan, Infeasible
from ..policies._decisions import Decision
from ..policies._plans import Backend, Call
from ._knapsack import Packing, pack
from ._sizes import Budget, budget_bytes
from ._trace import Item, Trace

Solver = Callable[..., Packing]


def solve(
    trace: Trace,
    budget: Budget,
    *,
    backend: Backend = "eager",
) -> BudgetPlan | Infeasible:
    """Plan what to keep so that backward repeats the least work within `budget`.

    The bytes are those kept between forward and backward, counted exactly and never over; use
    `plan_region` for a budget on the measured peak of a whole step.

    Args:
        trace: from `profile`.
        budget: bytes (int), a fraction of what can be kept (float), "6 GiB" or "50%".
        backend: "eager", or "compile" for compiled code, which may keep any value.

    Returns:
        A policy for `checkpoint`, or an `Infeasible` that says the smallest budget with a plan.

    Raises:
        BudgetError: the budget is negative, above 100%, or does not parse; or the backend is
            unknown.

    Example:
        >>> solve(Trace("ns", (), ()), "1 KiB").kept_bytes
        0
    """
    return solve_with(pack, trace, budget, backend=backend)


def solve_with(
    solver: Solver,
    trace: Trace,
    budget: Budget,
    *,
    backend: Backend = "eager",
) -> BudgetPlan | Infeasible:
    """As `solve`, with another knapsack solver: `solver(weights, values, capacity=...)`."""
    check_backend(trace, backend, where="solve")
    allowed = budget_bytes(budget, total_bytes=trace.total_bytes(backend))
    fixed, items = trace.fixed_bytes(backend), trace.items(backend)
    if allowed < fixed:
        return Infeasible(allowed, fixed, "what cannot be made again, and report names")
    sizes, costs = [item.kept_bytes for item in items], [item.cost for item in items]
    packing = solver(sizes, costs, capacity=allowed - fixed)
    bound, kept = packing.bound, [items[n] for n in packing.taken]
    slack = trace.slack_bytes if backend == "eager" else 0
    if slack:
        # What several values are made of is taken to be held, unless all are kept.
        bound = solver(sizes, costs, capacity=allowed - fixed + slack).bound
        if trace.bytes_kept(frozenset(i for item in items for i in item.ops)) <= allowed:
            kept = list(items)
    return plan_of(trace, kept, bound=bound, backend=backend)


def spread(trace: Trace, nth: int) -> BudgetPlan:
    """Plan to keep every `nth` value, so that no chain of replays is long.

    Which values it keeps depends on their order alone, not on what work was measured.

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
    return plan_of(trace, kept, bound=best.bound, backend="eager")


def check_backend(trace: object, backend: object, *, where: str) -> None:
    """Refuse what is no trace, and unknown backends.

    Raises:
        BudgetError: with what is accepted.
    """
    if not isinstance(trace, Trace):
        raise BudgetError(
            f"sac_policies.{where}: trace {shown(trace)} is a {type(trace).__name__}, but a plan "
            "is made from a Trace. Pass what profile(function, *args) returns."
        )
    if not (isinstance(backend, str) and backend in get_args(Backend)):
        raise BudgetError(
            f"sac_policies.{where}: backend {shown(backend)} is unknown, but a plan is for one of "
            f"{get_args(Backend)}. Use 'compile' for compiled code."
        )


def plan_of(trace: Trace, kept: Sequence[Item], *, bound: int, backend: Backend) -> BudgetPlan:
    """Write a choice of items as a plan.

    Args:
        trace: what the items belong to.
        kept: items of `trace.items(backend)` to keep.
        bound: no choice within the budget saves more work, in the trace's unit.
        backend: as for `solve`.
    """
    whole = sum(item.cost for item in trace.items(backend))
    saved = {i for item in kept for i in item.ops}
    is_eager = backend == "eager"
    return BudgetPlan(
        choices=_rows({trace.ops[i].key: Decision.SAVE for i in saved}),
        kept_bytes=trace.bytes_kept(saved) if is_eager else sum(item.kept_bytes for item in kept),
        recompute_cost=whole - sum(item.cost for item in kept),
        bound_cost=whole - bound,
        unit=trace.unit,
        backend=backend,
    )


def _rows(decided: Mapping[Call, Decision]) -> tuple[tuple[Call, Decision], ...]:
    return tuple(sorted(decided.items(), key=lambda row: row[0]))
