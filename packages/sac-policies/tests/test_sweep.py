"""Passes over a forward: loose ones are below every plan, exact ones follow the queue of copies."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sac_policies.budget._knapsack import pack
from sac_policies.budget.offloading import Copies, _sweep, choose
from sac_policies.budget.offloading._bounds import ONE, Values
from sac_policies.budget.offloading._copies import Stream
from sac_policies.budget.offloading._flow import PART, Rest
from sac_policies.budget.offloading._sweep import sweep

from ._copied import least_cost, random_region, traced


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.floats(0, 4), st.sampled_from([1, 2, 8]))
def test_no_plan_costs_less_than_a_loose_pass_says(seed: int, share: float, width: int) -> None:
    """Held against every way, at any price; also where states become one."""
    trace, rate, regions, capacity = random_region(seed, most=6)
    values = Values(trace.items("contexts"), Copies.of(trace.ops, rate, regions), capacity)
    price = int(share * values.byte_ns * regions * ONE)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_sweep, "_WIDTH", width)
        assert sweep(values, price).bound <= least_cost(trace, values.copies, capacity)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(0, 10**6))
def test_of_one_size_the_best_price_proves_the_plan(seed: int) -> None:
    """Of values of one size, loose passes know the queue: a plan is at most one value off."""
    r = random.Random(seed)
    sizes, costs = [1000] * 7, [r.choice((50, 500)) + r.randrange(100) for _ in range(7)]
    trace, regions = traced(sizes, costs), r.choice((1, 2, 32))
    copies = Copies.of(trace.ops, int(1e12 / r.choice((60, 300, 900))), regions)
    capacity = r.randrange(4000)
    values = Values(trace.items("contexts"), copies, capacity)
    least = least_cost(trace, copies, capacity)
    dearest = max(values.repeat) * ONE // 1000
    best = max(sweep(values, dearest * n // 400).bound for n in range(401))
    assert best <= least <= best + max(values.repeat)
    if capacity < 1000 and regions == 1:  # nothing is kept, and copies back are all waited for
        assert best == least == choose(values.items, copies, capacity=capacity, solver=pack).bound


@pytest.mark.parametrize("seed", range(100))
def test_what_an_exact_pass_offloads_waits_as_a_stream_does(seed: int) -> None:
    """One state after another; what it says of waits is what `Stream` says."""
    r = random.Random(seed)
    sizes = [r.randrange(1, 3000) for _ in range(12)]
    trace = traced(sizes, [r.randrange(1, 400) for _ in range(12)])
    copies, most = Copies.of(trace.ops, 5 * 10**9, 2), max(sizes)
    stream, push = Stream(copies, most), _sweep._exactly(most)
    ends, waited, queue = 0, 0, (0, 0, ())
    for op in sorted(r.sample(range(12), 7)):
        stream.copy(op)
        ends, waits, queue = push(ends, queue, copies.made[op], sizes[op], copies.times[op])
        waited += waits
        assert waited == stream.waited
        assert max(0, ends - copies.work) == stream.left
        assert max(0, ends - copies.made[op]) == stream.behind(op)


def test_the_largest_value_is_offloaded_by_an_exact_pass() -> None:
    """Also where that is not worth the wait, or the copy: queues are as long as it allows. Larger
    ones stay.
    """
    trace = traced([100, 900, 2000], [10**6, 905, 10])
    values = Values(trace.items("contexts"), Copies.of(trace.ops, 10**9, 1), 0)
    assert sweep(values, ONE).away == [0]
    assert sweep(values, ONE, 2).away == [0, 2]
    assert sweep(values, ONE, 1).away == [0, 1]
    assert sweep(values, ONE, 0).away == [0]


ROWS = [(0, 100), (1, 99), (2, 98), (50, 50), (90, 20), (91, 19)]
"""When copies have left, and what was spent."""


def front_of(rows: list[tuple[int, int]]) -> list[_sweep.State]:
    """States that offload nothing."""
    return [(ends, spent, n, None, (0, 0, ())) for n, (ends, spent) in enumerate(rows)]


def test_states_that_differ_the_least_go_together() -> None:
    """They are as early as the first and as cheap as the last."""
    thinned = [state[:3] for state in _sweep._thinned(front_of(ROWS), 3)]
    assert thinned == [(0, 98, 2), (50, 50, 3), (90, 19, 5)]


def test_half_of_the_states_go_on_that_pay_the_least_and_half_that_differ() -> None:
    """A nanosecond behind costs 2 up to the fiftieth, so that the third state is the best."""
    rest = Rest([2 * PART], [50], 9 * PART)
    go_on = _sweep._likeliest(front_of([*ROWS[:2], (2, 90), *ROWS[3:]]), 4, rest, 0)
    assert [state[0] for state in go_on] == [0, 2, 50, 90]


def test_a_value_that_is_too_large_is_never_kept() -> None:
    """At no price; and room that no value fills is none."""
    trace = traced([200, 200], [1000, 1000])
    values = Values(trace.items("contexts"), Copies.of(trace.ops, 1, 1), 199)
    assert values.capacity == 0
    assert sweep(values, 1).bound == 2000
    assert sweep(values, 1).kept_bytes == 0


def test_a_value_may_be_offloaded_only_so_that_others_may_fall_behind() -> None:
    """The first takes as long to copy as to repeat; others then wait for it and not one by one."""
    trace = traced([900, *[100] * 6], [450, *[60] * 5, 3000])
    values = Values(trace.items("contexts"), Copies.of(trace.ops, 10**9, 2), 0)
    least = least_cost(trace, values.copies, 0)
    choice = choose(values.items, values.copies, capacity=0, solver=pack)
    assert values.repeat[0] == values.copy[0]
    assert 0 in choice.away
    assert sweep(values, 10**6 * ONE).bound <= choice.bound == least
