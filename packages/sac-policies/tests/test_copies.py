"""What copies cost beside other work, by hand; the simulated device agrees (`test_waits`)."""

from __future__ import annotations

import random

from sac_policies.budget._offloading import Copies, Stream

from ._copied import traced

RATE = 10**9  # a byte in a nanosecond


def copies(sizes: list[int], costs: list[int], regions: int = 1) -> Copies:
    """Of values that take these nanoseconds each to make, and one a byte to copy."""
    return Copies.of(traced(sizes, costs).ops, RATE, regions)


def test_a_copy_out_is_hidden_behind_what_runs_after_it() -> None:
    """The copy back is not: the only region waits for it."""
    region = copies([30, 1], [10, 30])
    assert region.waits([0]) == 0 + 30
    assert region.waits([1]) == 1 + 1


def test_what_is_left_at_the_end_of_a_region_is_waited_for() -> None:
    """A copy of 30 beside work of 20, and the one after it."""
    region = copies([30, 5], [10, 20])
    assert region.waits([0]) == 10 + 30
    assert region.waits([0, 1]) == 15 + 35


def test_copies_fall_behind_by_less_than_the_largest_value() -> None:
    """Of three equal values the second waits for the first, though work is left to hide it."""
    region = copies([10, 10, 10, 1], [1, 1, 1, 100])
    assert region.waits([0, 1, 2]) == (9 + 9) + 30
    # A larger one lets them fall behind.
    region = copies([10, 10, 10, 20], [1, 1, 1, 100])
    assert region.waits([0, 1]) == 9 + 20
    assert region.waits([0, 1, 3]) == (20) + 40


def test_other_regions_wait_for_what_backward_of_the_next_does_not_hide() -> None:
    """A forward of 50: of copies of 30 nothing, of copies of 80 it is 30 in each of them."""
    assert copies([30, 1], [10, 40], regions=4).waits([0]) == 30
    out = 80 - 40
    assert copies([80, 1], [10, 40], regions=4).waits([0]) == 4 * out + 80 + 3 * (80 - 50)


def test_views_hide_nothing() -> None:
    """Nor do writes in place: what makes no bytes counts for no work."""
    region = copies([30, 0, 1], [10, 1000, 30])
    assert region.work == 40
    assert region.waits([0]) == 0 + 30


def test_times_are_rounded_up() -> None:
    """At a byte a second, and at more bytes than there are nanoseconds."""
    ops = traced([3, 5], [1, 1]).ops
    assert Copies.of(ops, 1, 1).times == (3 * 10**9, 5 * 10**9)
    assert Copies.of(ops, 2**63 - 1, 1).times == (1, 1)


def test_nothing_waits_for_nothing() -> None:
    """Nor does an empty forward."""
    assert Copies.of((), RATE, 3).waits([]) == 0
    assert copies([4], [4]).waits([]) == 0


def test_a_fork_of_a_stream_goes_its_own_way() -> None:
    """It is where the other one is, which stays there."""
    region = copies([10, 10, 10], [1, 1, 20])
    stream = Stream(region, 10)
    stream.copy(0)
    assert (stream.waited, stream.left) == (0, 0)
    fork = stream.fork()
    fork.copy(1)
    assert (fork.waited, fork.left) == (9, 0)
    assert (stream.waited, stream.left) == (0, 0)
    stream.copy(2)
    assert stream.waited == 0


def test_no_more_is_hidden_than_the_bound_says() -> None:
    """Of any values of random regions: what is copied and not waited for."""
    for seed in range(300):
        r = random.Random(seed)
        n = r.randrange(1, 12)
        region = copies(
            [r.randrange(1, 40) for _ in range(n)], [r.choice((0, 2, 99)) for _ in range(n)]
        )
        for _ in range(20):
            away = sorted(r.sample(range(n), r.randrange(1, n + 1)))
            moved = sum(region.times[op] for op in away)
            waits = region.waits(away) - moved
            assert waits >= moved - region.most_hidden(range(n))
