"""Rows of a report, and the numbers in its table."""

from __future__ import annotations

import pytest

from mod_tracker.reports._flops import FlopReport
from mod_tracker.reports._memory import MemoryRow
from mod_tracker.reports._report import PhaseRow, values_of


@pytest.mark.parametrize("kind", [PhaseRow, MemoryRow])
def test_amount_that_is_not_given_is_zero(kind):
    """A row may be made from the amounts that there are."""
    assert set(values_of(kind("Net")).values()) == {0}


def test_totals_of_a_row_are_sums_over_the_phases():
    """With and without the modules inside."""
    row = PhaseRow(
        "Net",
        self_forward=1,
        self_recompute=2,
        self_backward=4,
        forward=10,
        recompute=20,
        backward=40,
    )
    assert (row.self_total, row.total) == (7, 70)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 FLOP"),
        (999, "999 FLOP"),
        (1000, "1 kFLOP"),
        (-2500, "-2.5 kFLOP"),
        (999_000, "999 kFLOP"),
        (10**6, "1 MFLOP"),
        (999 * 10**6, "999 MFLOP"),
        (10**9, "1 GFLOP"),
        (999 * 10**9, "999 GFLOP"),
        (10**12, "1 TFLOP"),
    ],
)
def test_numbers_have_the_prefix_that_fits(value, text):
    """A prefix begins where there is one of it."""
    assert FlopReport().show(value) == text
