"""The nine outcomes, how one test becomes one of them, and what a set of them means.

Rule 1: only the suite may skip; a skip from anywhere else is an error.
Rule 2: an expected failure is never a pass, and an expected failure that passes is a mistake.
Rule 3: a profile is conformant when every MUST of it passed and the run had no problem.
Rule 4: an area, or a group of one, that an implementation does not have at all does not count
against it; where it has some of a group, the rest is not provided, and not conformant either.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

OUTCOMES = (
    "pass",
    "fail",
    "error",
    "xfail",
    "xpass",
    "not_claimed",
    "not_provided",
    "no_device",
    "not_run",
)

CONFORMANT = "conformant"
NOT_CONFORMANT = "not conformant"
NOT_CLAIMED = "not claimed"
NOT_PROVIDED = "not provided"
NO_DEVICE = "no device"


def worst(outcomes: Iterable[str]) -> str:
    """Give the outcome of a requirement from those of its cases."""
    return min(outcomes, key=_FROM_THE_WORST.index)


_FROM_THE_WORST = (
    *("error", "fail", "xpass", "not_run", "not_provided"),
    *("xfail", "no_device", "not_claimed", "pass"),
)


def absent(rows: Iterable[Mapping[str, Any]]) -> set[tuple[str, str]]:
    """Give area and group of what an implementation provides nothing of.

    Capabilities are of no group, `""`: they are absent only where the whole area is.
    """
    groups: dict[tuple[str, str], set[str]] = {}
    areas: dict[str, set[str]] = {}
    for row in rows:
        groups.setdefault((row["area"], row["group"]), set()).add(row["outcome"])
        areas.setdefault(row["area"], set()).add(row["outcome"])
    return {
        (area, group)
        for (area, group), found in groups.items()
        if areas[area] <= _NOTHING or (group and found <= _NOTHING)
    }


_NOTHING = {"not_provided", "not_claimed"}


# What no profile passes with, at whatever level.
_LEFT_OUT = {"not_run", "no_device", "not_provided", "xpass"}


def profile_verdict(rows: Iterable[Mapping[str, Any]], *, sound: bool) -> str:
    """Judge the rows of one area, profile, group and device.

    Args:
        rows: all rows of the profile; each has `level` and `outcome`.
        sound: the run had no problem.
    """
    outcomes = {row["outcome"] for row in rows}
    must = {row["outcome"] for row in rows if row["level"] == "MUST"}
    if outcomes <= {"not_claimed"}:
        return NOT_CLAIMED
    if outcomes <= {"not_provided", "not_claimed"}:
        return NOT_PROVIDED
    if outcomes <= {"no_device", "not_claimed"}:
        return NO_DEVICE
    if sound and must <= {"pass"} and not outcomes & _LEFT_OUT:
        return CONFORMANT
    return NOT_CONFORMANT
