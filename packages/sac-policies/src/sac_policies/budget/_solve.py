"""The best plan for a budget.

A value is kept or its operator runs again, so the work saved is what is left of a 0/1 knapsack:
keep the values worth most whose bytes fit. `_knapsack` solves it in integers. Where values may be
offloaded too, what counts of a copy is the time that regions wait for it (`offloading`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import get_args

from .._errors import BudgetError, shown
from ..policies._budget_plan import BudgetPlan, Infeasible
from ..policies._checked import is_count
from ..policies._decisions import Decision
from ..policies._plans import Backend, Call
from ._knapsack import pack
from ._offloading import Copies, Solver, choose
from ._sizes import Budget, budget_bytes, parse_size
from ._trace import Item, Trace


def solve(
    trace: Trace,
    budget: Budget,
    *,
    backend: Backend = "eager",
    host_bandwidth: Budget | None = None,
    regions: int = 1,
) -> BudgetPlan | Infeasible:
    """Plan what to keep so that backward repeats the least work within `budget`.

    The bytes are those kept between forward and backward, counted exactly and never over; use
    `plan_region` for a budget on the measured peak of a whole step.

    Args:
        trace: from `profile`.
        budget: bytes (int), a fraction of what can be kept (float), "6 GiB" or "50%".
        backend: "eager", or "compile" for compiled code, which may keep any value.
        host_bandwidth: bytes per second between the accelerator and pinned host memory ("25 GB",
            or what `measure_host_bandwidth` returns). Values are then offloaded, too, where
            waiting for their copies takes less time than making them again; needs a trace in "ns"
            of an eager region.
        regions: how many regions in a row follow the plan, such as equal blocks of a model. The
            values of all but the last are copied back while backward is at the region after.

    Returns:
        A policy for `checkpoint`, or an `Infeasible` that says the smallest budget with a plan.

    Raises:
        BudgetError: the budget is negative, above 100%, or does not parse; the backend is
            unknown; values cannot be offloaded under it; or there are no regions.

    Example:
        >>> solve(Trace("ns", (), ()), "1 KiB").kept_bytes
        0
    """
    return solve_with(
        pack, trace, budget, backend=backend, host_bandwidth=host_bandwidth, regions=regions
    )


def solve_with(
    solver: Solver,
    trace: Trace,
    budget: Budget,
    *,
    backend: Backend = "eager",
    host_bandwidth: Budget | None = None,
    regions: int = 1,
) -> BudgetPlan | Infeasible:
    """As `solve`, with another knapsack solver: `solver(weights, values, capacity=...)`."""
    check_backend(trace, backend, where="solve")
    rate = _checked_rate(host_bandwidth, trace, backend)
    if not is_count(regions) or regions == 0:
        raise BudgetError(
            f"sac_policies.solve: regions {shown(regions)} is not a number of regions, but at "
            "least one follows a plan. Pass how many regions of a step do."
        )
    allowed = budget_bytes(budget, total_bytes=trace.total_bytes(backend))
    fixed, items = trace.fixed_bytes(backend), trace.items(backend)
    if allowed < fixed:
        return Infeasible(allowed, fixed, "what cannot be made again, and report names")
    if rate is not None:
        return _offloading(solver, trace, allowed, Copies.of(trace.ops, rate, regions))
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


def _offloading(solver: Solver, trace: Trace, allowed: int, copies: Copies) -> BudgetPlan:
    """Plan with values offloaded, too; costs are those of one region."""
    items, regions = trace.items(), copies.regions
    capacity = allowed - trace.fixed_bytes()
    choice = choose(items, copies, capacity=capacity, solver=solver)
    away, copy_cost = [items[n] for n in choice.away], -(-choice.waits // regions)
    plan = plan_of(trace, [items[n] for n in choice.kept], bound=0, backend="eager")
    offloaded = {trace.ops[i].key: Decision.OFFLOAD for item in away for i in item.ops}
    return replace(
        plan,
        choices=_rows(dict(plan.choices) | offloaded),
        recompute_cost=plan.recompute_cost - sum(item.cost for item in away) + copy_cost,
        bound_cost=-(-choice.bound // regions),
        offloaded_bytes=sum(item.kept_bytes for item in away),
        copy_cost=copy_cost,
    )


def _checked_rate(rate: Budget | None, trace: Trace, backend: Backend) -> int | None:
    if rate is None:
        return None
    if backend != "eager":
        raise BudgetError(
            "sac_policies.solve: host_bandwidth is given, but compiled code keeps values on their "
            "device. Leave one of host_bandwidth and backend out."
        )
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
