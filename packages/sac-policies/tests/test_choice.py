"""Choices of what to keep, repeat and offload: never over, as good as they say they are."""

from __future__ import annotations

from typing import Any

import pytest

from sac_policies.budget import Trace
from sac_policies.budget._knapsack import pack
from sac_policies.budget._offloading import Choice, Copies, choose

from ._copied import blocks, least_cost, random_region, spread, traced


def costs_of(trace: Trace, copies: Copies, choice: Choice) -> int:
    """Work repeated and waits of all regions together."""
    items = trace.items()
    repeated = (i.cost for n, i in enumerate(items) if n not in choice.kept + choice.away)
    return copies.regions * sum(repeated) + choice.waits


@pytest.mark.parametrize("seed", range(200))
def test_few_values_are_chosen_well(seed: int) -> None:
    """Held against every way to keep, offload or repeat up to seven; the bound holds."""
    trace, rate, regions, capacity = random_region(seed, most=7)
    copies, items = Copies.of(trace.ops, rate, regions), trace.items()
    choice = choose(items, copies, capacity=capacity, solver=pack)
    least = least_cost(trace, copies, capacity)
    assert choice.bound <= least <= costs_of(trace, copies, choice) <= 1.1 * least
    assert sum(items[n].kept_bytes for n in choice.kept) <= capacity
    assert not set(choice.kept) & set(choice.away)


@pytest.mark.parametrize("make", [blocks, spread])
@pytest.mark.parametrize("speed", [0.3, 1.0])
@pytest.mark.parametrize("share", [0.1, 0.3])
@pytest.mark.parametrize("regions", [1, 8])
def test_choice_costs_no_more_than_simple_ones(
    make: Any, speed: float, share: float, regions: int
) -> None:
    """Keep and repeat alone; offload all that is copied both ways faster than it is made."""
    trace = make(1)
    whole, items = trace.total_bytes(), trace.items()
    rate = int(speed * whole * 1e9 / sum(op.cost for op in trace.ops))
    copies, capacity = Copies.of(trace.ops, rate, regions), int(share * whole)
    cost = costs_of(trace, copies, choose(items, copies, capacity=capacity, solver=pack))
    sizes = [item.kept_bytes for item in items]
    work = [regions * item.cost for item in items]
    both_ways = [min(w, 2 * regions * copies.times[n]) for n, w in enumerate(work)]
    for each in (work, both_ways):
        assert cost <= sum(each) - pack(sizes, each, capacity=capacity).value


def test_nobody_waits_where_copies_are_hidden() -> None:
    """Late values are kept, early ones offloaded, at most as many as are hidden: the order counts
    and not the worth, which is the same for all.
    """
    trace = traced([100] * 40, [100] * 40)
    copies = Copies.of(trace.ops, 2 * 10**8, 1000)  # a copy takes as long as five values
    choice = choose(trace.items(), copies, capacity=3200, solver=pack)
    assert len(choice.kept) == 32
    assert len(choice.away) == 7
    assert choice.waits == sum(copies.times[n] for n in choice.away)
    assert all(b - a >= 5 for a, b in zip(choice.away, choice.away[1:], strict=False))
