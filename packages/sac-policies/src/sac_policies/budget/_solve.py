"""The best plan for a budget.

A value is kept or its operator runs again, so the work saved is what is left of a 0/1 knapsack:
keep the values worth most whose bytes fit. `_knapsack` solves it in integers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import get_args

from .._errors import BudgetError, shown
from ..policies._budget_plan import BudgetPlan, Infeasible, Pack
from ..policies._decisions import Decision
from ..policies._plans import Target
from ._knapsack import Packing, pack
from ._sizes import Budget, budget_bytes
from ._trace import Item, Trace

Solver = Callable[..., Packing]


def solve(trace: Trace, budget: Budget, *, engine: Target = "recipe") -> BudgetPlan | Infeasible:
    """Plan what to keep so that backward repeats the least work within `budget`.

    The bytes are those kept between forward and backward, counted exactly and never over; use
    `fit` for a budget on the measured peak of a whole step.

    Args:
        trace: from `profile`.
        budget: bytes (int), a fraction of what can be kept (float), "6 GiB" or "50%".
        engine: which engine will follow the plan; "contexts" also for compiled code.

    Returns:
        A policy for `checkpoint`, or an `Infeasible` that says the smallest budget with a plan.

    Raises:
        BudgetError: the budget is negative, above 100%, or does not parse; or the engine is
            unknown.

    Example:
        >>> solve(Trace("ns", (), ()), "1 KiB").kept_bytes
        0
    """
    return solve_with(pack, trace, budget, engine=engine)


def solve_with(
    solver: Solver, trace: Trace, budget: Budget, *, engine: Target
) -> BudgetPlan | Infeasible:
    """As `solve`, with another knapsack solver: `solver(weights, values, capacity=...)`."""
    check_target(trace, engine, where="solve")
    fixed, items = trace.fixed_bytes(engine), trace.items(engine)
    allowed = budget_bytes(budget, total_bytes=trace.total_bytes(engine))
    if allowed < fixed:
        return Infeasible(budget_bytes=allowed, smallest_bytes=fixed)
    packing = solver(
        [item.kept_bytes for item in items],
        [item.cost for item in items],
        capacity=allowed - fixed,
    )
    return plan_of(trace, [items[n] for n in packing.taken], bound=packing.bound, engine=engine)


def spread(trace: Trace, nth: int) -> BudgetPlan:
    """Plan for the recipe engine to keep every `nth` value, so that no chain of replays is long.

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
        capacity=sum(item.kept_bytes for item in kept),
    )
    return plan_of(trace, kept, bound=best.bound, engine="recipe")


def check_target(trace: object, engine: object, *, where: str) -> None:
    """Refuse what is no trace, and engines that no plan is for.

    Raises:
        BudgetError: with what is.
    """
    if not isinstance(trace, Trace):
        raise BudgetError(
            f"sac_policies.{where}: trace {shown(trace)} is a {type(trace).__name__}, but a plan "
            "is made from a Trace. Pass what profile(function, *args) returns."
        )
    if not (isinstance(engine, str) and engine in get_args(Target)):
        raise BudgetError(
            f"sac_policies.{where}: engine {shown(engine)} is unknown, but a plan is for one of "
            f"{get_args(Target)}. Use 'contexts' for compiled code too."
        )


def plan_of(trace: Trace, kept: Sequence[Item], *, bound: int, engine: Target) -> BudgetPlan:
    """Write a choice of items as a plan.

    Args:
        trace: what the items belong to.
        kept: items of `trace.items(engine)` to keep.
        bound: no choice within the budget saves more work, in the trace's unit.
        engine: as for `solve`.
    """
    items = trace.items(engine)
    work = sum(item.cost for item in items)
    saved = {i for item in kept for i in item.ops}
    return BudgetPlan(
        choices=tuple(sorted((trace.ops[i].key, Decision.SAVE) for i in saved)),
        packs=_packs(trace, saved) if engine == "recipe" else (),
        kept_bytes=trace.fixed_bytes(engine) + sum(item.kept_bytes for item in kept),
        recompute_cost=work - sum(item.cost for item in kept),
        bound_cost=work - bound,
        unit=trace.unit,
        engine=engine,
        inputs=trace.inputs,
    )


def _packs(trace: Trace, saved: set[int]) -> tuple[Pack, ...]:
    replayed = {storage for storage in trace.replayable if storage[0] not in saved}
    return tuple((pack.producer, pack.storage not in replayed) for pack in trace.packs)
