"""Memory of steps in which only some regions offload."""

from __future__ import annotations

import itertools

import pytest

from sac_policies.budget._measure import Interval, Moved
from sac_policies.budget._offloaded import Offloaded

BACK = {1: 8, 2: 3}
"""By level, the bytes that a region moves, and asks for."""


def step(choice, vain=0):
    """A step in which some regions offload and others use no memory.

    The first region in backward prefetches `vain` bytes too many, for itself and for the next.
    """
    does = [number for number, level in enumerate(choice) if level]
    found = [Interval(None, 0, 0)]
    for number, level in enumerate(choice):
        size = BACK.get(level, 0)
        found += [
            Interval((number, 0, False), 0, size, Moved(size)),
            Interval((number, 0, None), 0, 0),
        ]
    for number in reversed(range(len(choice))):
        if number not in does:
            found.append(Interval((number, 0, True), 0, 0))
            continue
        own = BACK[choice[number]]
        earlier = [BACK[choice[n]] for n in does if n < number][-1:]
        # A region's own values were prefetched, except for the first region.
        came = sum(earlier) + own * (number == does[-1])
        came += vain * len(does[-2:]) * (number == does[-1])
        unread = vain * (number in does[-2:])
        freed = own + unread
        moved = Moved(back=came, unread=unread)
        found.append(Interval((number, 0, True), came - freed, came, moved))
    return found


@pytest.mark.parametrize("vain", [0, 4])
def test_mixtures_follow_from_steps_on_single_levels(vain):
    """For all mixtures of four regions: bytes at the end of each interval, and its peak.

    The measured steps may also contain unused prefetches; they occur once per step.
    """
    measured = [step((level,) * 4, vain) for level in range(3)]
    offloaded = Offloaded(measured)
    by_level = [{each.key: each for each in one} for one in measured]
    for choice in itertools.product(range(3), repeat=4):
        made = [
            offloaded.among(choice, by_level[choice[each.key[0]]][each.key]) if each.key else each
            for each in measured[0]
        ]
        expected = step(choice)
        taken = [[(each.grown, each.most) for each in one] for one in (made, expected)]
        assert taken[0] == taken[1], choice
        assert sum(grown for grown, _ in taken[0]) == 0


def test_regions_that_are_called_again_are_left_as_they_were_measured():
    """Their neighbours are not known."""
    again = [each for each in step((1, 1)) for _ in "ab"]
    offloaded = Offloaded([step((0, 0)), again])
    assert [offloaded.among((1, 0), each) for each in again if each.key] == [
        each for each in again if each.key
    ]


def test_one_region_has_no_neighbour():
    """The same holds for a step in which nothing was offloaded."""
    for level in (0, 1):
        found = step((level,))
        offloaded = Offloaded([step((0,)), found])
        assert all(offloaded.among((level,), each) == each for each in found if each.key)
