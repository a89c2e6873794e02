"""Bounds on what values cost: below every plan, whatever their prices."""

from __future__ import annotations

import random

import pytest

from sac_policies.budget._knapsack import pack
from sac_policies.budget.offloading._bounds import ONE, Prices, Values
from sac_policies.budget.offloading._copies import Copies

from ._copied import least_cost, random_region


@pytest.mark.parametrize("seed", range(60))
def test_no_plan_costs_less_than_a_bound(seed: int) -> None:
    """At random prices, up to those at which nothing is hidden."""
    trace, rate, regions, capacity = random_region(seed, most=6)
    copies = Copies.of(trace.ops, rate, regions)
    values = Values(trace.items("contexts"), copies, capacity)
    least = least_cost(trace, copies, capacity)
    assert values.bound_of_kept(pack) <= least
    r = random.Random(seed)
    for _ in range(50):
        out = r.randrange(regions * ONE + 1)
        kept = int(r.lognormvariate(0, 3) * values.byte_ns * ONE)
        for prices in (Prices(out, kept), Prices(0, kept)):
            assert values.bound(prices) <= least


def test_density_is_that_of_the_value_that_fills_the_room() -> None:
    """And nothing where all fit."""
    trace, *_ = random_region(0)
    values = Values(trace.items("contexts"), Copies.of(trace.ops, 10**9, 1), 0)
    worth = [size * (n + 1) for n, size in enumerate(values.sizes)]
    assert values.density(0, worth) == len(worth)
    assert values.density(values.sizes[-1], worth) == len(worth) - 1
    assert values.density(sum(values.sizes), worth) == 0.0
