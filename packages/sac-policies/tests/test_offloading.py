"""Plans that keep, repeat or offload: within budget, honest about their cost, never dearer."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sac_policies import BudgetError, solve
from sac_policies.budget import BudgetPlan, Trace, _solve, pareto
from sac_policies.budget._knapsack import Packing, pack
from sac_policies.budget._offloading import Copies
from sac_policies.policies import Decision, from_json, to_json

from . import test_solve
from ._copied import least_cost, random_region

OFFLOAD = Decision.OFFLOAD
random_trace = partial(test_solve.random_trace, held=0.0)


def offloading(trace: Trace, budget: Any, rate: Any, regions: int = 1) -> BudgetPlan:
    """A plan that may offload."""
    plan = solve(trace, budget, host_bandwidth=rate, regions=regions)
    assert isinstance(plan, BudgetPlan)
    return plan


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(0, 10**6))
def test_figures_of_plans_are_true(seed: int) -> None:
    """Held against every way to keep, offload or repeat seven values."""
    trace, rate, regions, budget = random_region(seed, most=7)
    plan, copies = offloading(trace, budget, rate, regions), Copies.of(trace.ops, rate, regions)
    least = least_cost(trace, copies, budget)
    assert (
        plan.bound_cost <= -(-least // regions) <= plan.recompute_cost <= 1 + 1.25 * least / regions
    )
    decided = dict(plan.choices)
    away = [n for n, op in enumerate(trace.ops) if decided.get(op.key) is OFFLOAD]
    assert plan.copy_cost == -(-copies.waits(away) // regions)
    assert plan.offloaded_bytes == sum(trace.ops[n].out_bytes for n in away)
    repeated = sum(op.cost for op in trace.ops if op.key not in decided)
    assert plan.recompute_cost == repeated + plan.copy_cost
    kept = sum(op.out_bytes for op in trace.ops if decided.get(op.key) is Decision.SAVE)
    assert kept == plan.kept_bytes <= budget
    assert from_json(to_json(plan)) == plan


@pytest.mark.parametrize("regions", [1, 3])
def test_fronts_have_such_plans(regions: int) -> None:
    """As `solve` gives them."""
    trace = random_trace(2, n=12)
    front = pareto(trace, host_bandwidth="25 GB", regions=regions, points=5)
    for point in front:
        plan = offloading(trace, point.bytes, "25 GB", regions)
        assert point.seconds == plan.recompute_cost / 1e9
    assert front[-1].seconds == 0


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.floats(0, 1), st.integers(1, 10**13), st.integers(1, 40))
def test_copies_that_overlap_cost_no_more_than_in_full(
    seed: int, share: float, rate: int, regions: int
) -> None:
    """Nor do they cost more in a row of more regions, as the bound says."""
    trace = random_trace(seed, n=60)
    plan = offloading(trace, share, rate, regions)
    full = sum(min(item.cost, -(-2 * item.kept_bytes * 10**9 // rate)) for item in trace.items())
    saved = pack(
        [item.kept_bytes for item in trace.items()],
        [min(i.cost, -(-2 * i.kept_bytes * 10**9 // rate)) for i in trace.items()],
        capacity=int(share * trace.total_bytes()),
    )
    assert plan.bound_cost <= plan.recompute_cost <= full - saved.value
    assert offloading(trace, share, rate, regions + 1).bound_cost <= plan.recompute_cost


def test_gap_of_a_plan_that_is_not_the_best_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dearest values are left out, one in twenty; the bound stays."""

    def careless(weights: Any, values: Any, *, capacity: int) -> Packing:
        best = pack(weights, values, capacity=capacity)
        by_value = sorted(best.taken, key=lambda n: values[n])
        taken = tuple(sorted(by_value[: len(by_value) * 19 // 20]))
        weight, value = (sum(each[n] for n in taken) for each in (weights, values))
        return replace(best, taken=taken, weight=weight, value=value)

    trace = random_trace(0, n=2000)
    budget = int(0.2 * trace.total_bytes())
    good = offloading(trace, budget, "200 GB")
    monkeypatch.setattr(_solve, "pack", careless)
    plan = solve(trace, budget, host_bandwidth="200 GB")
    assert isinstance(plan, BudgetPlan)
    assert plan.kept_bytes <= budget
    assert plan.bound_cost <= good.recompute_cost <= plan.recompute_cost


@pytest.mark.parametrize("regions", [1, 32])
@pytest.mark.parametrize("share", [0.1, 0.2])
@pytest.mark.parametrize("seed", range(3))
def test_two_thousand_values_of_three_choices_are_planned(
    seed: int, share: float, regions: int
) -> None:
    """Never over the budget, and within half a percent of the proved bound.

    Most plans take 50 to 200 ms of thread time. The limit is far above that: it is for a search
    that does not end early.
    """
    trace = random_trace(seed, n=2000)
    budget = int(share * trace.total_bytes())
    began = time.thread_time()
    plan = offloading(trace, budget, "200 GB", regions)
    spent = time.thread_time() - began
    decided, items = dict(plan.choices), trace.items()
    of_items = [decided.get(trace.ops[item.ops[0]].key) for item in items]
    assert set(of_items) == {Decision.SAVE, OFFLOAD, None}
    saved = (item for item, what in zip(items, of_items, strict=True) if what is Decision.SAVE)
    held = sum(item.kept_bytes for item in saved)
    assert trace.fixed_bytes() + held == plan.kept_bytes <= budget
    assert plan.gap < 0.005
    assert spent < 5


@pytest.mark.parametrize("regions", [1, 10])
def test_a_slow_host_offloads_nothing(regions: int) -> None:
    """And the plan is that of two choices."""
    trace = random_trace(1)
    slow = offloading(trace, 0.5, "1 B", regions)
    assert slow == solve(trace, 0.5)
    assert slow.offloaded_bytes == slow.copy_cost == 0
    assert not slow.offloads


@pytest.mark.parametrize("rate", [10**15, 2**63 - 1])
def test_a_host_as_fast_as_can_be_is_asked_for_all_that_is_not_kept(rate: int) -> None:
    """A copy takes a nanosecond each way."""
    trace = random_trace(1)
    plan = offloading(trace, 0, rate)
    assert plan.kept_bytes == 0
    assert plan.offloaded_bytes == trace.total_bytes()
    assert plan.recompute_cost == plan.copy_cost <= 2 * len(trace.ops)
    assert plan.gap <= 1 / (len(trace.ops) + 1)  # the last copy is hidden by nothing


@pytest.mark.parametrize("budget", [0, "50%", "100%"])
def test_of_an_empty_trace_nothing_is_planned(budget: Any) -> None:
    """It costs nothing."""
    plan = offloading(Trace("ns", (), ()), budget, "25 GB", 12)
    assert (plan.choices, plan.recompute_cost, plan.bound_cost) == ((), 0, 0)


def test_with_room_for_all_nothing_is_offloaded() -> None:
    """Copies of values that may stay save nothing."""
    plan = offloading(random_trace(1), "100%", 10**15, 32)
    assert (plan.offloaded_bytes, plan.recompute_cost) == (0, 0)


@pytest.mark.parametrize("rate", ["25 GB", "25GB/s", 25 * 10**9, 25e9])
def test_rates_are_bytes_per_second(rate: float | str) -> None:
    """As text or number."""
    trace = random_trace(3)
    assert offloading(trace, 0.2, rate) == offloading(trace, 0.2, 25_000_000_000)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"host_bandwidth": 0}, "host_bandwidth 0 is not a rate"),
        ({"host_bandwidth": "fast"}, "host_bandwidth 'fast' is not a rate"),
        ({"host_bandwidth": True}, "host_bandwidth True is not a rate"),
        (
            {"host_bandwidth": float("nan")},
            "host_bandwidth nan is not a rate",
        ),
        ({"host_bandwidth": "50%"}, "host_bandwidth '50%' is not a rate"),
        ({"regions": 0}, "regions 0 is not a number of regions"),
        ({"regions": 1.5}, "regions 1.5 is not a number of regions"),
        ({"regions": True}, "regions True is not a number of regions"),
    ],
)
def test_offloading_that_cannot_be_is_refused(given: dict[str, Any], said: str) -> None:
    """By name, before anything is solved."""
    with pytest.raises(BudgetError, match=re.escape(said)):
        solve(random_trace(0), 0.5, **given)


def test_copies_have_no_price_in_operations() -> None:
    """A trace in floating point operations says nothing of time."""
    trace = Trace("flops", (), ())
    with pytest.raises(BudgetError, match="Profile with unit='ns'"):
        solve(trace, 0.5, host_bandwidth="25 GB")
