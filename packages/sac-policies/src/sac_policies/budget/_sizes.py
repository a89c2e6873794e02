"""Sizes in bytes as text, and budgets as sizes or fractions."""

from __future__ import annotations

import math
import re
from fractions import Fraction

from .._errors import BudgetError, shown

Budget = int | float | str
"""Bytes (int), a fraction of what can be kept (float in [0, 1]), "6 GiB", or "50%"."""

_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12} | {
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_LONGEST = 100
"""Characters of the longest size that is read."""
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+|%)\s*", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Read a size such as "6 GiB" or "1.5MB" in bytes, rounded down.

    Powers of 1024 are spelled KiB, MiB, GiB and TiB; powers of 1000 KB, MB, GB and TB.

    Raises:
        BudgetError: the number or the unit is missing, or the unit is unknown.

    Example:
        >>> parse_size("6 GiB")
        6442450944
    """
    number, unit = _read(text) if isinstance(text, str) else (Fraction(0), "")
    if unit not in _UNITS:
        raise BudgetError(
            f"sac_policies.parse_size: size {shown(text)} does not parse, but a size is a number "
            "and "
            'one of B, KB, KiB, MB, MiB, GB, GiB, TB, TiB. Write for example "6 GiB".'
        )
    return int(number * _UNITS[unit])


def format_size(size_bytes: int) -> str:
    """Format a size in the largest binary unit with a nonzero integer part.

    Raises:
        BudgetError: not a whole number of fewer than 20 digits.

    Example:
        >>> format_size(14_711_520)
        '14.03 MiB'
    """
    if type(size_bytes) is not int or abs(size_bytes) >= 2**64:
        raise BudgetError(
            f"sac_policies.format_size: size {shown(size_bytes)} is a "
            f"{type(size_bytes).__name__}, but a size is an int below 2**64. Round it first."
        )
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if abs(size_bytes) >= _UNITS[unit.lower()]:
            return f"{size_bytes / _UNITS[unit.lower()]:.2f} {unit}"
    return f"{size_bytes} B"


def budget_bytes(budget: Budget, *, total_bytes: int, what: str = "budget") -> int:
    """Convert a budget to bytes; fractions are of `total_bytes`, rounded down.

    Args:
        budget: bytes, a fraction, or text.
        total_bytes: base of fractions.
        what: name of the argument, for messages.

    Raises:
        BudgetError: negative, a fraction above 1, or invalid text.

    Example:
        >>> budget_bytes("50%", total_bytes=1001), budget_bytes(0.25, total_bytes=1000)
        (500, 250)
    """
    if isinstance(budget, str):
        number, unit = _read(budget)
        if unit == "%":
            return _share(number / 100, budget, total_bytes, what)
        return parse_size(budget)
    if isinstance(budget, float):
        share = Fraction(budget) if math.isfinite(budget) else Fraction(-1)
        return _share(share, budget, total_bytes, what)
    if isinstance(budget, bool) or not isinstance(budget, int) or budget < 0:
        raise BudgetError(
            f"sac_policies.budget: {what} {shown(budget)} is not a size, but a {what} is "
            'bytes (int, at least 0), a fraction (float) or text. Write for example "6 GiB" or 0.5.'
        )
    return budget


def _read(text: str) -> tuple[Fraction, str]:
    match = _SIZE.fullmatch(text) if len(text) <= _LONGEST else None
    return (Fraction(match[1]), match[2].lower()) if match else (Fraction(0), "")


def _share(fraction: Fraction, written: Budget, total_bytes: int, what: str) -> int:
    if not 0 <= fraction <= 1:
        is_percent = isinstance(written, float) and 1 < written <= 100
        remedy = f'Write "{written:g}%" for percent, or an int' if is_percent else "Pass an int"
        raise BudgetError(
            f"sac_policies.budget: {what} {shown(written)} is a fraction, but a fraction is "
            f"between 0 and 1. {remedy} for bytes."
        )
    return int(fraction * total_bytes)
