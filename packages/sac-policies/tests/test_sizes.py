"""Sizes and budgets are parsed and formatted."""

from __future__ import annotations

import pytest

from sac_policies import BudgetError
from sac_policies.budget import format_size, parse_size
from sac_policies.budget._sizes import budget_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("6 GiB", 6 * 2**30),
        ("6gib", 6 * 2**30),
        ("1.5MB", 1_500_000),
        ("0.3 KiB", 307),
        (" 17 B ", 17),
        ("2 KB", 2000),
        ("3 GB", 3 * 10**9),
        ("2 TB", 2 * 10**12),
        ("3 MiB", 3 * 2**20),
        ("2 TiB", 2 * 2**40),
    ],
)
def test_size_is_read(text: str, size: int) -> None:
    """Units ignore case, binary and decimal ones differ, fractions of a byte are dropped."""
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["6", "GiB", "6 GB iB", "-1 GiB", "6 gigs", "", "50%", "1e3 B"])
def test_unreadable_size_raises(text: str) -> None:
    """The error names text that is not a number with a known unit."""
    with pytest.raises(BudgetError, match=r"parse_size: size '.*' does not parse, but a size is"):
        parse_size(text)


def test_number_is_no_size_to_read() -> None:
    """Sizes are passed as text with a unit."""
    with pytest.raises(BudgetError, match=r"size 6 does not parse"):
        parse_size(6)


@pytest.mark.parametrize(
    ("budget", "size"),
    [
        *(("50%", 500), ("100%", 1001), ("0%", 0), (0.25, 250), (1.0, 1001), (0.0, 0)),
        *((0, 0), (77, 77), ("1 KB", 1000)),
    ],
)
def test_budget_is_bytes_or_a_share(budget: float | str, size: int) -> None:
    """An int is bytes, a float is a share, a text is either."""
    assert budget_bytes(budget, total_bytes=1001) == size


@pytest.mark.parametrize("budget", [1.5, -0.1, float("nan"), float("inf"), "101%"])
def test_share_outside_of_unit_interval_raises(budget: float | str) -> None:
    """A share above one is more likely a size without a unit."""
    with pytest.raises(BudgetError, match=r"is a fraction, but a fraction is between 0 and 1"):
        budget_bytes(budget, total_bytes=1)


@pytest.mark.parametrize("budget", [-1, True, None])
def test_budget_that_is_no_size_raises(budget: object) -> None:
    """Negative sizes and other types are refused."""
    with pytest.raises(BudgetError, match=r"is not a size, but a budget is bytes"):
        budget_bytes(budget, total_bytes=1)  # type: ignore[arg-type]  # the wrong type is the test


@pytest.mark.parametrize(
    ("size", "text"),
    [
        *((14_711_520, "14.03 MiB"), (1023, "1023 B"), (1024, "1.00 KiB"), (0, "0 B")),
        *((3 * 2**30, "3.00 GiB"), (2**40, "1.00 TiB"), (-(2**21), "-2.00 MiB")),
        (2**64 - 2**40, "16777215.00 TiB"),
    ],
)
def test_size_is_written(size: int, text: str) -> None:
    """The largest binary unit that fits is used."""
    assert format_size(size) == text


@pytest.mark.parametrize("size", [2**64, -(2**64), True, 1.0, "1 KB"])
def test_what_is_no_size_is_not_written(size: object) -> None:
    """Only integers of fewer than 65 bits are sizes."""
    with pytest.raises(BudgetError, match=r"but a size is an int below 2\*\*64\. Round it first"):
        format_size(size)  # type: ignore[arg-type]  # the wrong type is the test
