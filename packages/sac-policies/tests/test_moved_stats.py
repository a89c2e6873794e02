"""What offloaded values have moved, and how much host memory they may take."""

from __future__ import annotations

import pytest

import sac_policies as sp
from sac_policies.eager._moved_stats import Counters, counters


@pytest.fixture(autouse=True)
def _no_limit():
    """None is left for other tests."""
    yield
    counters.limit = None


def test_bytes_are_away_until_they_are_gone():
    """A number that never left is no error: a finalizer may come where nothing had begun."""
    made = Counters()
    number = made.out(64)
    assert (made.copies_out, made.bytes_out, made.bytes_away) == (1, 64, 64)
    made.gone(number)
    made.gone(number)
    made.gone(-1)
    assert made.bytes_away == 0


def test_room_is_what_the_limit_leaves():
    """What does not fit is counted as kept."""
    made = Counters()
    assert made.has_room(10**12)
    made.limit = 100
    number = made.out(60)
    assert made.has_room(40)
    assert not made.has_room(41)
    assert made.kept == 1
    made.gone(number)
    assert made.has_room(100)


def test_stats_are_a_value():
    """Of this process; nothing moves on a CPU."""
    assert isinstance(sp.offload_stats(), sp.reports.OffloadStats)
    assert sp.offload_stats() == sp.offload_stats()


@pytest.mark.parametrize("value", [-1, 1.5, True, "8 GB"], ids=repr)
def test_a_limit_that_is_no_number_of_bytes_is_refused(value):
    """And the limit stays as it was."""
    sp.limit_offload(5)
    with pytest.raises(
        sp.PolicyError,
        match=r"sac_policies.limit_offload: max_bytes .* is not a number of bytes, but it must be "
        r"an int of at least 0, or None. Pass such a number.",
    ):
        sp.limit_offload(value)
    assert counters.limit == 5
