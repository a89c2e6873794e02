"""What regions that offload take beside others that do not."""

from __future__ import annotations

import itertools

import pytest

from sac_policies.budget._measure import Interval, Moved
from sac_policies.budget._offloaded import Offloaded

OUT, BACK, OFFLOADS = 10, 8, 1


def step(choice, vain=0):
    """A step of regions of which some offload, as the rules say; others take nothing.

    A region moves `OUT` bytes, of which it asks for `BACK`. The first in backward asks in vain for
    more, for itself and for the next.
    """
    does = [number for number, level in enumerate(choice) if level == OFFLOADS]
    found = [Interval(None, 0, 0)]
    for number in range(len(choice)):
        offloads = number in does
        moved = Moved(OUT * offloads)
        found += [
            Interval((number, 0, False), 0, OUT * offloads, None, moved),
            Interval((number, 0, None), 0, 0),
        ]
    for number in reversed(range(len(choice))):
        if number not in does:
            found.append(Interval((number, 0, True), 0, 0))
            continue
        # Its own are there, but where it is the first.
        first, second = number in does[-1:], number in does[-2:-1]
        came = BACK * (number != does[0]) + BACK * first
        came += vain * len(does[-2:]) * first
        unread = vain * (first or second)
        freed = BACK + unread
        moved = Moved(back=came, unread=unread)
        found.append(Interval((number, 0, True), came - freed, came, None, moved))
    return found


@pytest.mark.parametrize("vain", [0, 4])
def test_mixtures_follow_from_the_step_in_which_all_offload(vain):
    """The bytes at the end of each interval, and the most in it, of all mixtures of four regions.

    Also where something was asked for in vain in that step, which happens once.
    """
    all_do = step((OFFLOADS,) * 4, vain)
    offloaded = Offloaded(OFFLOADS, all_do)
    plain = {each.key: each for each in step((0,) * 4)}
    for choice in itertools.product((0, OFFLOADS), repeat=4):
        made = [
            offloaded.among(choice, each)
            if each.key and choice[each.key[0]] == OFFLOADS
            else plain[each.key]
            for each in all_do
        ]
        expected = step(choice)
        taken = [[(each.grown, each.most) for each in one] for one in (made, expected)]
        assert taken[0] == taken[1], choice
        assert sum(grown for grown, _ in taken[0]) == 0


def test_regions_that_are_called_again_are_left_as_they_were_measured():
    """Whose neighbour is whose is not known then."""
    again = [each for each in step((OFFLOADS,) * 2) for _ in "ab"]
    offloaded = Offloaded(OFFLOADS, again)
    assert [offloaded.among((OFFLOADS, 0), each) for each in again if each.key] == [
        each for each in again if each.key
    ]


def test_one_region_has_no_neighbour():
    """Nor has a step in which nothing was offloaded."""
    for choice in ((OFFLOADS,), (0,)):
        found = step(choice)
        offloaded = Offloaded(OFFLOADS, found)
        assert all(offloaded.among(choice, each) == each for each in found if each.key)
