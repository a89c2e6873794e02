"""Numbers with their units."""

from __future__ import annotations

import pytest

from mod_tracker._numbers import bytes_shown, time_shown, with_unit


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (-1000, "-1 kB"),
        (10**6, "1 MB"),
        (123_456_789, "123 MB"),
        (10**9, "1 GB"),
        (5 * 10**12, "5 TB"),
    ],
)
def test_amounts_have_the_largest_prefix_that_fits(value, shown):
    """Three digits, decimal prefixes, the sign kept."""
    assert with_unit(value, "B") == bytes_shown(value) == shown


@pytest.mark.parametrize(
    ("nanoseconds", "shown"),
    [(0, "0 ns"), (999, "999 ns"), (1000, "1 us"), (10**6, "1 ms"), (-(10**9), "-1 s")],
)
def test_times_have_the_unit_that_fits(nanoseconds, shown):
    """From nanoseconds to seconds."""
    assert time_shown(nanoseconds) == shown
