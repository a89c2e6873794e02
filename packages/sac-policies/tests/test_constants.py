"""Tensors that replays read count once, unless all values that read them are kept."""

from __future__ import annotations

import random
from dataclasses import replace

from sac_policies import solve
from sac_policies.budget import BudgetPlan, Held, Infeasible, Trace, TracedOp, TracedPack

from .test_solve import random_trace


def trace_of(*packs: TracedPack) -> Trace:
    """A trace of four calls."""
    ops = tuple(TracedOp("aten.mm.default", at, 100, 100, ()) for at in range(4))
    return Trace("ns", ops, packs)


MASK, TABLE = Held(0, 0, 40), Held(1, 0, 30)
COPIES = Held(-1, 1, 5), Held(-1, 2, 5)


def test_constant_of_one_value_is_free_where_that_is_kept() -> None:
    """Keeping 100 bytes costs 60 more than recomputing them."""
    trace = trace_of(TracedPack("Sin", 2, 0, 100, (MASK,)))
    assert (trace.fixed_bytes(), trace.total_bytes()) == (40, 100)
    assert [item.kept_bytes for item in trace.items()] == [60]


def test_constant_of_several_values_is_held_for_each_of_them() -> None:
    """It is there as long as one is not kept; two copies are two."""
    packs = (
        TracedPack("Sin", 2, 0, 100, (MASK, COPIES[0])),
        TracedPack("Cos", 3, 0, 100, (MASK, COPIES[1])),
    )
    trace = trace_of(*packs)
    assert trace.bytes_kept(frozenset()) == 40 + 5 + 5
    assert trace.bytes_kept({2}) == 100 + 40 + 5
    assert trace.bytes_kept({2, 3}) == trace.total_bytes() == 200
    assert [item.kept_bytes for item in trace.items()] == [95, 95]


def test_storage_that_is_kept_anyway_counts_once() -> None:
    """As another saved tensor; but where less is kept of that, both count."""
    read = TracedPack("Sin", 2, 0, 100, (MASK,))
    for saved, fixed in ((40, 40), (5, 45)):
        trace = trace_of(read, TracedPack("", 0, 0, saved))
        assert trace.fixed_bytes() == fixed
        assert trace.total_bytes() == 100 + saved
        assert [item.kept_bytes for item in trace.items()] == [100 if saved == 40 else 60]


def test_what_calls_that_are_made_again_read_is_always_held() -> None:
    """Such a saved tensor takes nothing itself, and a plan has no say in it."""
    overwritten = TracedPack("Cos", 3, 0, 0, (TABLE,))
    trace = trace_of(overwritten, TracedPack("Sin", 2, 0, 100, (TABLE,)))
    trace = replace(trace, ops=(*trace.ops[:3], replace(trace.ops[3], overwritten=True)))
    assert trace.fixed_bytes() == 30
    assert trace.total_bytes() == 130
    assert [item.kept_bytes for item in trace.items()] == [100]


def test_value_that_one_reader_holds_is_made_again_for_the_other() -> None:
    """And holds what that reads."""
    packs = (TracedPack("Sin", 2, 0, 100, (MASK,)), TracedPack("", 2, 0, 100))
    assert trace_of(*packs).fixed_bytes() == 140


def with_constants(seed: int) -> Trace:
    """A random trace in which half of the values are made again of up to three constants."""
    r, trace = random.Random(seed), random_trace(seed)
    others = [Held(-1, at, int(r.lognormvariate(8, 2))) for at in range(1, 7)]
    packs = tuple(
        replace(pack, reads=tuple(r.sample(others, r.randrange(4)))) if r.random() < 0.5 else pack
        for pack in trace.packs
    )
    return replace(trace, packs=packs)


def test_no_plan_is_over_budget_for_what_it_holds() -> None:
    """Nor is there none for a budget that a smaller one has a plan for."""
    for seed in range(200):
        trace = with_constants(seed)
        low, high = trace.fixed_bytes(), trace.total_bytes()
        costs = []
        for budget in sorted(random.Random(seed).randrange(high + 1) for _ in range(6)):
            plan = solve(trace, budget)
            assert isinstance(plan, Infeasible) == (budget < low)
            if isinstance(plan, BudgetPlan):
                assert plan.kept_bytes <= budget
                costs.append(plan.recompute_cost)
        assert costs == sorted(costs, reverse=True)
        everything = solve(trace, high)
        assert isinstance(everything, BudgetPlan)
        assert (everything.recompute_cost, everything.kept_bytes <= high) == (0, True)


def test_no_choice_repeats_less() -> None:
    """Of all that keep some of eight values and fit, counted one by one."""
    for seed in range(20):
        trace = random_trace(seed)
        trace = replace(trace, ops=trace.ops[:8], packs=trace.packs[:8])
        items = trace.items()
        whole = sum(item.cost for item in items)
        for share in (0.3, 0.6, 0.9):
            plan = solve(trace, share)
            if not isinstance(plan, BudgetPlan):
                continue
            chosen = [
                [item for at, item in enumerate(items) if bits >> at & 1]
                for bits in range(1 << len(items))
            ]
            fitting = [
                sum(item.cost for item in kept)
                for kept in chosen
                if trace.bytes_kept({item.op for item in kept}) <= int(share * trace.total_bytes())
            ]
            assert plan.recompute_cost == whole - max(fitting)
