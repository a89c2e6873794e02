"""Copies as a flow: below every plan that keeps to its limits, and exact where parts are whole."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest

from sac_policies import TracedOp
from sac_policies.budget._knapsack import pack
from sac_policies.budget.offloading import Copies, choose
from sac_policies.budget.offloading._bounds import ONE, Values
from sac_policies.budget.offloading._flow import (
    PART,
    ByLargest,
    Rest,
    bound_of,
    flow,
    limits_of,
    usual_limits,
)

from ._copied import random_region, traced


def plans(values: Values) -> Iterator[tuple[int, set[int]]]:
    """What every plan costs, and what it offloads."""
    copies = values.copies
    for ways in itertools.product("kor", repeat=len(values.items)):
        if values.fits(n for n in values.all if ways[n] == "k"):
            away = {n for n in values.all if ways[n] == "o"}
            repeated = sum(values.repeat[n] for n in values.all if ways[n] == "r")
            yield (
                repeated + copies.waits(sorted(o for n in away for o in values.items[n].ops)),
                away,
            )


def random_values(seed: int, most: int = 6) -> Values:
    """Of a random region."""
    trace, rate, regions, capacity = random_region(seed, most)
    return Values(trace.items("contexts"), Copies.of(trace.ops, rate, regions), capacity)


@pytest.mark.parametrize("seed", [*range(200), 2838])
def test_no_plan_costs_less_than_the_flow_of_its_largest_value(seed: int) -> None:
    """Whichever value is the largest, or none larger; at prices at which values are offloaded."""
    values, r = random_values(seed), random.Random(seed)
    known = list(plans(values))
    for n in values.all:
        most = values.largest[n]
        limits = limits_of(values, most, values.all)
        within = [
            (cost, away) for cost, away in known if all(values.largest[m] <= most for m in away)
        ]
        at_most = min(cost for cost, _ in within)
        forced = min(cost for cost, away in within if n in away)
        for _ in range(8):
            price = int(r.lognormvariate(0.5, 1.5) * values.byte_ns * ONE)
            assert bound_of(values, price, limits) <= at_most
            assert bound_of(values, price, limits_of(values, most, values.all, n), n) <= forced


@pytest.mark.parametrize("seed", range(150))
def test_no_plan_costs_less_than_the_least_of_these_flows(seed: int) -> None:
    """Also where what a known plan costs rules values out, or is the best."""
    values, r = random_values(seed), random.Random(seed)
    known = sorted(cost for cost, _ in plans(values))
    least = known[0]
    for cost in (least, r.choice(known), r.choice(known[: 1 + len(known) // 20])):
        price = int(r.lognormvariate(0, 1) * values.byte_ns * ONE)
        assert ByLargest(values, price, cost).bound() <= least


def test_limits_know_which_copy_can_be_under_way() -> None:
    """By hand; bytes take a nanosecond each, and sizes are in tens."""
    trace = traced([90, 10, 10, 100, 10], [50, 50, 1000, 50, 50])
    values = Values(trace.items("contexts"), Copies.of(trace.ops, 10**9, 1), 0)
    others = 90 + 9  # together smaller than 100, each rounded up
    assert values.behind(100) == others
    # The first, made at 50, has left by 50 + 99: so 49 at the most are left when the second is
    # made, and nothing of either when the third is. Beside the largest, nothing is behind.
    limits = [others, others + 49, others, others + 10, others + 50]
    assert limits_of(values, 100, values.all) == limits
    assert limits_of(values, 100, values.all, 3) == [*limits[:3], 100, limits[4]]
    assert limits_of(values, 100, {1, 2, 4}) == [None, others, others, None, others]
    assert limits_of(values, 99, values.all)[3] is None
    assert usual_limits(values, 0) == [90, 90, 90, None, 90]


def test_a_flow_offloads_what_fits_of_what_saves_the_most() -> None:
    """Two values take 100 to copy each, and 160 are hidden; ten regions wait for the rest."""
    ops = [TracedOp("aten.mm.default", n, 100, 10, (), n) for n in range(2)]
    ops.append(TracedOp("aten.mm.default", 2, 1, 150, (), 2))
    items = traced([100] * 2, [10] * 2).items("contexts")
    values, stay = Values(items, Copies.of(ops, 10**9, 10), 0), [300, 200]
    trail: dict[int, Rest] = {}
    # The first saves 200, 60 of the second save 60.
    assert flow(values, stay, [1000, 1000], None, trail) == -(200 + 60) * PART
    assert trail[1].at([0, 100, 150, 160, 170]) == [0, 0, 0, 100 * PART, 200 * PART]
    # What is forced is offloaded whole: 60 of the first save 120.
    assert flow(values, stay, [1000, 1000], 1) == -(100 + 120) * PART
    assert flow(values, stay, [None, 1000]) == -100 * PART
    # By the second, ten of the first have left: as much as fits of it within the limit.
    assert flow(values, stay, [100, 100]) == -(200 + 10) * PART


def test_what_is_still_to_pay_is_told_for_many_at_once() -> None:
    """As for each alone, and past the last slope as waiting."""
    rest = Rest([0, 3, 5], [10, 4, 6], 7)
    assert rest.at(range(-2, 24)) == [rest.at([each])[0] for each in range(-2, 24)]
    assert rest.at([-1, 10, 12, 14, 20, 22]) == [0, 0, 6, 12, 42, 56]


@pytest.mark.parametrize("seed", [6, 9])
def test_the_hardest_of_two_thousand_values_are_near_the_bound(seed: int) -> None:
    """Little may stay, and 32 regions wait for a copy: what the benchmark found the hardest."""
    r = random.Random(seed)
    sizes = [int(r.lognormvariate(14, 2)) + 1 for _ in range(2000)]
    trace = traced(sizes, [int(r.lognormvariate(10, 2)) + 1 for _ in range(2000)])
    copies, items = Copies.of(trace.ops, 25 * 10**9, 32), trace.items("contexts")
    choice = choose(items, copies, capacity=sum(sizes) // 50, solver=pack)
    repeated = (item.cost for n, item in enumerate(items) if n not in {*choice.kept, *choice.away})
    assert choice.bound >= 0.995 * (32 * sum(repeated) + choice.waits)
    assert sum(items[n].kept_bytes for n in choice.kept) <= sum(sizes) // 50
