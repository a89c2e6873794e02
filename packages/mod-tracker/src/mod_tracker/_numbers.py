"""Numbers with units, in three digits."""

from __future__ import annotations

_PREFIXES = ((10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k"))
_TIMES = ((10**9, "s"), (10**6, "ms"), (10**3, "us"))


def with_unit(value: int, unit: str) -> str:
    """Format an amount.

    Example:
        >>> with_unit(20480, "B"), with_unit(-7, "B")
        ('20.5 kB', '-7 B')
    """
    for factor, prefix in _PREFIXES:
        if abs(value) >= factor:
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value} {unit}"


def bytes_shown(value: int) -> str:
    """Format a number of bytes with a decimal prefix."""
    return with_unit(value, "B")


def time_shown(nanoseconds: int) -> str:
    """Format a time in the unit that fits.

    Example:
        >>> time_shown(1500), time_shown(12)
        ('1.5 us', '12 ns')
    """
    for factor, unit in _TIMES:
        if abs(nanoseconds) >= factor:
            return f"{nanoseconds / factor:.3g} {unit}"
    return f"{nanoseconds} ns"
