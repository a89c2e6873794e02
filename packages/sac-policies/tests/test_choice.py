"""Choices of what to keep, repeat and offload: never over, as good as they say they are."""

from __future__ import annotations

import random
from importlib import import_module
from typing import Any

import pytest

from sac_policies import Trace
from sac_policies.budget._knapsack import pack
from sac_policies.budget.offloading import Choice, Copies, _choice, choose
from sac_policies.budget.offloading._choice import _fill

from ._copied import blocks, least_cost, random_region, spread, traced


def costs_of(trace: Any, copies: Copies, choice: Choice) -> int:
    """Work repeated and waits of all regions together."""
    items = trace.items("compile")
    repeated = (i.cost for n, i in enumerate(items) if n not in choice.kept + choice.away)
    return copies.regions * sum(repeated) + choice.waits


@pytest.mark.parametrize("seed", range(200))
def test_of_few_values_no_other_choice_costs_less(seed: int) -> None:
    """Held against every way to keep, offload or repeat up to seven; the bound proves it."""
    trace, rate, regions, capacity = random_region(seed, most=7)
    copies, items = Copies.of(trace.ops, rate, regions), trace.items("compile")
    choice = choose(items, copies, capacity=capacity, solver=pack)
    cost = costs_of(trace, copies, choice)
    assert cost == choice.bound == least_cost(trace, copies, capacity, "compile")
    assert sum(items[n].kept_bytes for n in choice.kept) <= capacity
    assert not set(choice.kept) & set(choice.away)


@pytest.mark.parametrize("seed", range(20))
def test_of_values_that_are_not_tried_in_all_ways_the_bound_holds(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for large regions, held against all ways."""
    monkeypatch.setattr(_choice, "_FEW", 0)
    trace, rate, regions, capacity = random_region(seed, most=7)
    copies, items = Copies.of(trace.ops, rate, regions), trace.items("compile")
    choice = choose(items, copies, capacity=capacity, solver=pack)
    least = least_cost(trace, copies, capacity, "compile")
    assert choice.bound <= least <= costs_of(trace, copies, choice) <= 1.5 * least


def test_of_nothing_nothing_is_chosen() -> None:
    """An empty forward costs nothing."""
    copies = Copies.of((), 10**9, 3)
    assert choose((), copies, capacity=0, solver=pack) == Choice((), (), 0, 0)


def test_nobody_waits_where_copies_are_hidden() -> None:
    """Late values are kept, early ones offloaded, at most as many as are hidden: the order counts
    and not the worth, which is the same for all.
    """
    trace = traced([100] * 40, [100] * 40)
    copies = Copies.of(trace.ops, 2 * 10**8, 1000)  # a copy takes as long as five values
    choice = choose(trace.items("compile"), copies, capacity=3200, solver=pack)
    assert len(choice.kept) == 32
    assert len(choice.away) == 7
    assert choice.waits == sum(copies.times[n] for n in choice.away)
    assert all(b - a >= 5 for a, b in zip(choice.away, choice.away[1:], strict=False))


@pytest.mark.parametrize(
    ("trace", "speed", "regions", "share", "gap"),
    [
        (blocks(1), 0.3, 8, 0.3, 0.015),  # 0.017 without exact passes
        (
            blocks(1),
            0.3,
            8,
            0.1,
            0.08,
        ),  # 0.10 without exact passes, 0.20 if nothing is changed, too
        (spread(1), 0.3, 32, 0.3, 0.04),  # 0.05 without more states, or if no largest is forced
        (spread(1), 1, 32, 0.1, 0.01),  # 0.095 without exact passes
    ],
)
def test_more_values_are_chosen_well(
    trace: Trace, speed: float, regions: int, share: float, gap: float
) -> None:
    """As near to the bound as they were found to come; `speed` is the copies' beside the work's."""
    whole = trace.total_bytes("contexts")
    rate = int(speed * whole * 1e9 / sum(op.cost for op in trace.ops))
    copies, capacity = Copies.of(trace.ops, rate, regions), int(share * whole)
    choice = choose(trace.items("compile"), copies, capacity=capacity, solver=pack)
    assert choice.bound >= (1 - gap) * costs_of(trace, copies, choice)


def test_a_value_is_offloaded_so_that_others_may_fall_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first takes longer to copy than to repeat; without it, others wait one by one."""
    monkeypatch.setattr(_choice, "_FEW", 0)
    trace = traced([900, *[100] * 6], [449, *[60] * 5, 3000])
    copies = Copies.of(trace.ops, 10**9, 2)
    choice = choose(trace.items("compile"), copies, capacity=0, solver=pack)
    assert 0 in choice.away
    assert costs_of(trace, copies, choice) == least_cost(trace, copies, 0)


def test_calls_that_are_decided_together_are_offloaded_too() -> None:
    """A thousand pairs, whose copies nobody waits for."""
    trace = traced([100] * 2000, [100] * 2000, [n - n % 2 for n in range(2000)])
    copies = Copies.of(trace.ops, 10**12, 4)
    choice = choose(trace.items("compile"), copies, capacity=0, solver=pack)
    assert len(choice.away) == 1000


def test_filling_takes_what_is_worth_most_for_its_bytes() -> None:
    """And fits, and is worth anything."""
    packing = _fill([4, 2, 3, 1], [4, 6, 3, 0], capacity=7)
    assert sorted(packing.taken) == [0, 1]
    assert (packing.weight, packing.value) == (6, 10)
    assert packing.bound >= pack([4, 2, 3, 1], [4, 6, 3, 0], capacity=7).value


@pytest.mark.parametrize("regions", [1, 32])
@pytest.mark.parametrize("seed", range(2))
def test_bound_is_below_what_highs_finds(seed: int, regions: int) -> None:
    """A mixed integer program, in which copies need only be hidden by the end of the forward."""
    pytest.importorskip("scipy", reason="scipy is not installed")
    r = random.Random(seed)
    sizes = [int(r.lognormvariate(10, 1)) + 1 for _ in range(24)]
    trace = traced(sizes, [int(r.lognormvariate(8, 1)) + 1 for _ in range(24)])
    copies, items = Copies.of(trace.ops, 5 * 10**9, regions), trace.items("compile")
    capacity = sum(sizes) // 5
    choice = choose(items, copies, capacity=capacity, solver=pack)
    assert choice.bound <= _highs(trace, copies, capacity) <= costs_of(trace, copies, choice) + 1


def _highs(trace: Trace, copies: Copies, capacity: int) -> float:
    """For each value whether it is kept and whether it is offloaded; waits out, and back."""
    optimize = import_module("scipy.optimize")
    n, regions = len(trace.ops), copies.regions
    repeat = [regions * op.cost for op in trace.ops]
    objective = [-c for c in repeat]
    objective += [t - c for t, c in zip(copies.times, repeat, strict=True)]
    zeros, moved = [0] * n, list(copies.times)
    rows = [([*copies.sizes, *zeros, 0, 0], capacity)]
    rows += [
        (
            [
                *(int(k == i) for k in range(n)),
            ]
            * 2
            + [0, 0],
            1,
        )
        for i in range(n)
    ]
    late = ([*zeros, *(t if k >= i else 0 for k, t in enumerate(moved)), -1, 0] for i in range(n))
    rows += [(row, copies.work - made) for row, made in zip(late, copies.made, strict=True)]
    rows.append(([*zeros, *moved, 0, -1], copies.work))
    answer = optimize.milp(
        [*objective, regions, regions - 1],
        constraints=optimize.LinearConstraint([row for row, _ in rows], ub=[at for _, at in rows]),
        bounds=optimize.Bounds(0, [1] * (2 * n) + [float("inf")] * 2),
        integrality=[1] * (2 * n) + [0, 0],
        options={"mip_rel_gap": 0.0},
    )
    return float(answer.fun) + sum(repeat)
