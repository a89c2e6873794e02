"""Known failures of an implementation: its own checks then fail only on changes.

    [[known_failure]]
    id = "CW-012"
    devices = ["cpu"]
    reason = "recomputation reads the wrong random state"
    issue = "https://example.org/issues/7"
    expires = 2027-03-01

A known failure that passes, matches no requirement or has expired is a problem of the run. A crash
cannot be a known failure.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchparts_conformance import _report
from torchparts_conformance._errors import ReportError
from torchparts_conformance.requirements._areas import is_device
from torchparts_conformance.requirements._cases import parse_toml

_MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class KnownFailure:
    """One known failure."""

    id: str
    devices: tuple[str, ...]
    reason: str
    issue: str
    expires: datetime.date


def load(path: Path | None) -> list[KnownFailure]:
    """Read known failures; without a file there are none."""
    if path is None:
        return []
    try:
        data = parse_toml(_report.read_text(path, role="known failures", max_bytes=_MAX_BYTES))
        return [_entry(**entry) for entry in data.pop("known_failure", [])]
    except (TypeError, ValueError, RecursionError) as error:
        if isinstance(error, ReportError):
            raise
        raise ReportError(
            f"known failures {path.name!r:.100}: {error!s:.160}. Each [[known_failure]] has id, "
            "devices, reason, issue and expires."
        ) from error


def _entry(*, id: Any, devices: Any, reason: Any, issue: Any, expires: Any) -> KnownFailure:
    if not all(isinstance(word, str) and word.strip() for word in (id, reason)):
        raise ValueError("id and reason must be non-empty text")
    if not isinstance(devices, list) or not devices or not all(map(is_device, devices)):
        raise ValueError(f"devices of {id} is {devices!r:.60}; write a list such as ['cpu']")
    if not isinstance(issue, str) or not issue.startswith("https://"):
        raise ValueError(f"issue of {id} is {issue!r:.60}; it must be an https address")
    if type(expires) is not datetime.date:
        raise ValueError(f"expires of {id} is {expires!r:.60}; write a date such as 2027-03-01")
    return KnownFailure(id, tuple(devices), reason, issue, expires)


def announce(
    rows: list[dict[str, Any]], known: Iterable[KnownFailure], *, today: datetime.date | None = None
) -> tuple[list[dict[str, Any]], list[str]]:
    """Turn known failures into xfail, and those that pass into xpass.

    An entry names a requirement: at least one of its cases has to fail, others may pass.

    Returns:
        The rows, and a problem for each entry that does not hold.
    """
    day = today or datetime.date.today()
    outcomes: dict[tuple[str, str], set[str]] = {}
    for row in rows:
        outcomes.setdefault((row["id"], row["device"]), set()).add(row["outcome"])
    changes: dict[tuple[str, str], dict[str, str]] = {}
    problems = []
    for entry in known:
        for place in ((entry.id, device) for device in entry.devices):
            found = outcomes.get(place, set())
            fails = "fail" in found
            changes[place] = {"fail": "xfail"} if fails else {"pass": "xpass"}
            if why := _violation(entry, found, fails, day):
                problems.append(f"known failure {' on '.join(place)}: {why}")
    changed = [_changed(row, changes.get((row["id"], row["device"]), {})) for row in rows]
    return changed, problems


def _violation(entry: KnownFailure, outcomes: set[str], fails: bool, day: datetime.date) -> str:
    if entry.expires < day:
        return f"expired on {entry.expires}"
    if not outcomes:
        return "no such requirement was run"
    return "" if fails else f"did not fail ({', '.join(sorted(outcomes))})"


def _changed(row: Mapping[str, Any], outcomes: Mapping[str, str]) -> dict[str, Any]:
    return {**row, "outcome": outcomes.get(row["outcome"], row["outcome"])}
