"""What is held for values that are made again counts: once, and while one of them is not kept."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from sac_policies import solve
from sac_policies.budget import BudgetPlan, Infeasible, Trace, TracedConstant, TracedOp, TracedPack

from .test_solve import random_trace


def trace_of(*packs: TracedPack, constants: tuple[TracedConstant, ...]) -> Trace:
    """Of as many calls as made something, each at the cost of its bytes."""
    sizes = {pack.made_by: pack.storage_bytes for pack in packs} | {
        each.made_by: each.storage_bytes for each in constants if each.made_by >= 0
    }
    ops = tuple(
        TracedOp("aten.mm.default", at, sizes.get(at, 0), sizes.get(at, 0), (), at)
        for at in range(max(sizes) + 1)
    )
    return Trace("ns", ops, packs, constants=constants)


MASK, TABLE = TracedConstant(0, 0, 40), TracedConstant(1, 0, 30)
COPY = TracedConstant(-1, 0, 5)


def test_constant_of_one_value_is_free_where_that_is_kept() -> None:
    """Keeping 100 bytes takes 60 more than making them again does."""
    trace = trace_of(TracedPack("Sin", 2, 0, 100, (0,)), constants=(MASK,))
    assert (trace.fixed_bytes(), trace.total_bytes(), trace.slack_bytes) == (40, 100, 0)
    assert [item.kept_bytes for item in trace.items()] == [60]


def test_constant_of_several_values_is_held_for_each_of_them() -> None:
    """It is there as long as one is not kept; two copies are two."""
    packs = (TracedPack("Sin", 2, 0, 100, (0, 1)), TracedPack("Cos", 3, 0, 100, (0, 2)))
    trace = trace_of(*packs, constants=(MASK, COPY, COPY))
    assert trace.bytes_kept(frozenset()) == 40 + 5 + 5
    assert trace.bytes_kept({2}) == 100 + 40 + 5
    assert trace.bytes_kept({2, 3}) == trace.total_bytes() == 200
    assert trace.slack_bytes == 40


def test_storage_that_is_kept_anyway_counts_once() -> None:
    """As another saved tensor; but where less is kept of that, both count."""
    read = TracedPack("Sin", 2, 0, 100, (0,))
    for saved, fixed in ((40, 40), (5, 45)):
        trace = trace_of(read, TracedPack("", 0, 0, saved), constants=(MASK,))
        assert trace.fixed_bytes() == fixed
        assert trace.total_bytes() == 100 + saved
        assert [item.kept_bytes for item in trace.items()] == [100 if saved == 40 else 60]


def test_what_calls_that_are_made_again_read_is_always_held() -> None:
    """Such a saved tensor takes nothing itself, and a plan has no say in it."""
    packs = (TracedPack("", 3, 0, 0, (1,)), TracedPack("Sin", 2, 0, 100, (1,)))
    trace = trace_of(*packs, constants=(MASK, TABLE))
    assert trace.fixed_bytes() == 30
    assert trace.total_bytes() == 130
    assert [item.kept_bytes for item in trace.items()] == [100]


def test_value_that_one_reader_holds_is_made_again_for_the_other() -> None:
    """And holds what that reads."""
    packs = (TracedPack("Sin", 2, 0, 100, (0,)), TracedPack("", 2, 0, 100))
    assert trace_of(*packs, constants=(MASK,)).fixed_bytes() == 140


def with_constants(seed: int) -> Trace:
    """A random trace in which half of the values are made again of up to three constants."""
    r, trace = random.Random(seed), random_trace(seed)
    constants = tuple(TracedConstant(-1, 0, int(r.lognormvariate(8, 2))) for _ in range(6))
    packs = tuple(
        replace(pack, reads=tuple(sorted(r.sample(range(6), r.randrange(4)))))
        if r.random() < 0.5
        else pack
        for pack in trace.packs
    )
    return replace(trace, packs=packs, constants=constants)


def test_no_plan_is_over_budget_for_what_it_holds() -> None:
    """Nor is there none for a budget that a smaller one has a plan for."""
    shared = 0
    for seed in range(200):
        trace = with_constants(seed)
        shared += trace.slack_bytes > 0
        low, high = trace.fixed_bytes(), trace.total_bytes()
        costs = []
        for budget in sorted(random.Random(seed).randrange(high + 1) for _ in range(6)):
            plan = solve(trace, budget)
            assert isinstance(plan, Infeasible) == (budget < low)
            if isinstance(plan, BudgetPlan):
                assert plan.kept_bytes <= budget
                assert plan.bound_cost <= plan.recompute_cost
                costs.append(plan.recompute_cost)
        assert costs == sorted(costs, reverse=True)
        everything = solve(trace, high)
        assert isinstance(everything, BudgetPlan)
        assert (everything.recompute_cost, everything.kept_bytes <= high) == (0, True)
    assert shared > 100


def test_no_choice_repeats_less_than_the_bound() -> None:
    """Of all that keep some of eight values and fit, counted one by one."""
    for seed in range(20):
        trace = with_constants(seed)
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
                if trace.bytes_kept({at for item in kept for at in item.ops})
                <= int(share * trace.total_bytes())
            ]
            assert plan.bound_cost <= whole - max(fitting) <= plan.recompute_cost


def test_json_keeps_them() -> None:
    """And a text from before there were any is read."""
    trace = trace_of(TracedPack("Sin", 2, 0, 100, (0, 1)), constants=(MASK, COPY))
    assert Trace.from_json(trace.to_json()) == trace
    old = trace.to_json().replace(', "reads": [0, 1]', "")
    old = old[: old.index(', "constants"')] + "}"
    assert Trace.from_json(old) == replace(
        trace, packs=(TracedPack("Sin", 2, 0, 100),), constants=()
    )


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('"reads": [0, 1]', '"reads": [0, 2]', r"saved tensor 0 reads constants \(0, 2\)"),
        ('"reads": [0, 1]', '"reads": [-1]', r"saved tensor 0 reads constants \(-1,\)"),
        ('"made_by": -1', '"made_by": 9', "constant 1 is made by operator 9"),
    ],
)
def test_damaged_text_is_refused(old: str, new: str, problem: str) -> None:
    """With what cannot be."""
    text = trace_of(TracedPack("Sin", 2, 0, 100, (0, 1)), constants=(MASK, COPY)).to_json()
    assert old in text
    with pytest.raises(ValueError, match=problem):
        Trace.from_json(text.replace(old, new))
