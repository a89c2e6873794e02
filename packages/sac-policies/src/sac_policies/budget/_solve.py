"""The best plan for a budget.

A value is kept or its operator runs again, so the work saved is a 0/1 knapsack: keep the values
worth most whose bytes fit. `_knapsack` solves it in integers. Where values may be offloaded too,
the cost of a copy is the time that regions wait for it (`_offloading`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from .._errors import BudgetError, shown
from ..policies._budget_plan import BudgetPlan, Infeasible
from ..policies._checked import is_count
from ..policies._decisions import Decision
from ..policies._plans import Call
from ._knapsack import pack
from ._offloading import Copies, choose
from ._sizes import Budget, budget_bytes, parse_size
from ._trace import Item, Trace


def solve(
    trace: Trace,
    budget: Budget,
    *,
    host_bandwidth: Budget | None = None,
    regions: int = 1,
) -> BudgetPlan | Infeasible:
    """Plan what to keep so that backward repeats the least work within `budget`.

    The bytes are those kept between forward and backward, counted exactly and never over; use
    `plan_region` for a budget on the measured peak of a whole step.

    Args:
        trace: from `profile`.
        budget: bytes (int), a fraction of what can be kept (float), "6 GiB" or "50%".
        host_bandwidth: bytes per second between the accelerator and pinned host memory ("25 GB",
            or what `measure_host_bandwidth` returns). Values are then offloaded, too, where
            waiting for their copies takes less time than making them again; needs a trace in "ns".
        regions: how many regions in a row follow the plan, such as equal blocks of a model. The
            values of all but the last are copied back while backward is at the region after.

    Returns:
        A policy for `checkpoint`, or an `Infeasible` that says the smallest budget with a plan.

    Raises:
        BudgetError: the budget is negative, above 100%, or does not parse; values cannot be
            offloaded with this trace; or there are no regions.

    Example:
        >>> solve(Trace("ns", (), ()), "1 KiB").kept_bytes
        0
    """
    check_trace(trace, where="solve")
    rate = None if host_bandwidth is None else _checked_rate(host_bandwidth, trace)
    if not is_count(regions) or regions == 0:
        raise BudgetError(
            f"sac_policies.solve: regions {shown(regions)} is not a number of regions, but at "
            "least one follows a plan. Pass how many regions of a step do."
        )
    allowed = budget_bytes(budget, total_bytes=trace.total_bytes())
    fixed, items = trace.fixed_bytes(), trace.items()
    if allowed < fixed:
        return Infeasible(allowed, fixed, "what cannot be made again, and report names")
    if rate is not None:
        return _offloading(trace, items, allowed - fixed, Copies.of(trace.ops, rate, regions))
    sizes, costs = [item.kept_bytes for item in items], [item.cost for item in items]
    packing = pack(sizes, costs, capacity=allowed - fixed)
    bound, kept = packing.bound, [items[n] for n in packing.taken]
    if slack := trace.slack_bytes:
        # What several values are made of is taken to be held, unless all are kept.
        bound = pack(sizes, costs, capacity=allowed - fixed + slack).bound
        if trace.total_bytes() <= allowed:
            kept = list(items)
    return plan_of(trace, kept, bound=bound)


def _offloading(trace: Trace, items: Sequence[Item], capacity: int, copies: Copies) -> BudgetPlan:
    """Plan with values offloaded, too; costs are those of one region."""
    regions = copies.regions
    choice = choose(items, copies, capacity=capacity, solver=pack)
    away, copy_cost = [items[n] for n in choice.away], -(-choice.waits // regions)
    plan = plan_of(trace, [items[n] for n in choice.kept], bound=0)
    offloaded = {trace.ops[i].key: Decision.OFFLOAD for item in away for i in item.ops}
    return replace(
        plan,
        choices=_rows(dict(plan.choices) | offloaded),
        recompute_cost=plan.recompute_cost - sum(item.cost for item in away) + copy_cost,
        bound_cost=-(-choice.bound // regions),
        offloaded_bytes=sum(item.kept_bytes for item in away),
        copy_cost=copy_cost,
    )


def _checked_rate(rate: Budget, trace: Trace) -> int:
    if trace.unit != "ns":
        raise BudgetError(
            f"sac_policies.solve: host_bandwidth is given, but the trace counts {trace.unit!r} and "
            "copies take time. Profile with unit='ns'."
        )
    told = rate.strip().removesuffix("/s") if isinstance(rate, str) else rate
    try:
        read = parse_size(told) if isinstance(told, str) else told
    except BudgetError:
        read = 0
    if isinstance(read, bool) or not isinstance(read, (int, float)) or not 1 <= read < 2**63:
        raise BudgetError(
            f"sac_policies.solve: host_bandwidth {shown(rate)} is not a rate, but copies take "
            'bytes divided by bytes per second. Write for example "25 GB", or pass what '
            "measure_host_bandwidth() returns."
        )
    return int(read)


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
    return plan_of(trace, kept, bound=best.bound)


def check_trace(trace: object, *, where: str) -> None:
    """Refuse what is no trace.

    Raises:
        BudgetError: with what is accepted.
    """
    if not isinstance(trace, Trace):
        raise BudgetError(
            f"sac_policies.{where}: trace {shown(trace)} is a {type(trace).__name__}, but a plan "
            "is made from a Trace. Pass what profile(function, *args) returns."
        )


def plan_of(trace: Trace, kept: Sequence[Item], *, bound: int) -> BudgetPlan:
    """Write a choice of items as a plan.

    Args:
        trace: what the items belong to.
        kept: items of `trace.items()` to keep.
        bound: no choice within the budget saves more work, in the trace's unit.
    """
    whole = sum(item.cost for item in trace.items())
    saved = {i for item in kept for i in item.ops}
    return BudgetPlan(
        choices=_rows({trace.ops[i].key: Decision.SAVE for i in saved}),
        kept_bytes=trace.bytes_kept(saved),
        recompute_cost=whole - sum(item.cost for item in kept),
        bound_cost=whole - bound,
        unit=trace.unit,
    )


def _rows(decided: Mapping[Call, Decision]) -> tuple[tuple[Call, Decision], ...]:
    return tuple(sorted(decided.items(), key=lambda row: row[0]))
