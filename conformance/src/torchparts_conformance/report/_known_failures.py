"""Failures an implementation announces, so that its own checks stay quiet until they change.

    [[known_failure]]
    id = "CW-012"
    devices = ["cpu"]
    reason = "the recomputation reads the wrong random state"
    issue = "https://example.org/issues/7"
    expires = 2027-03-01

An announcement has to be true: one that passes, matches nothing, has no address or is past its
day is a problem, and a run with a problem is not conformant. A crash cannot be announced.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchparts_conformance import _toml
from torchparts_conformance._errors import ReportError
from torchparts_conformance.report import _untrusted_file
from torchparts_conformance.requirements._areas import is_device

MAX_BYTES = 1 << 20
NOTICE = datetime.timedelta(days=30)
_DID_NOT = "did not fail"
_KEYS = {"id", "devices", "reason", "issue", "expires"}


@dataclass(frozen=True)
class KnownFailure:
    """One announced failure."""

    id: str
    devices: tuple[str, ...]
    reason: str
    issue: str
    expires: datetime.date


def load(path: Path | None) -> tuple[KnownFailure, ...]:
    """Read announced failures; without a file there are none.

    Raises:
        ReportError: the file cannot be read, or an entry is incomplete.
    """
    if path is None:
        return ()
    text = _untrusted_file.read_text(path, role="known failures", max_bytes=MAX_BYTES)
    try:
        data = _toml.parse(text)
    except (ValueError, RecursionError) as error:
        raise ReportError(
            f"known failures {path.name!r:.200} are no TOML: {error!s:.120}. Correct the file."
        ) from error
    entries = data.get("known_failure", [])
    if set(data) - {"known_failure"} or not isinstance(entries, list):
        raise ReportError(
            f"known failures {path.name!r:.200} hold something else, but [[known_failure]] tables "
            "are all there is. Take it out."
        )
    return tuple(_entry(entry) for entry in entries)


def _entry(entry: Any) -> KnownFailure:
    if not isinstance(entry, dict) or set(entry) != _KEYS:
        raise ReportError(
            f"known failure {entry!r:.120} has other keys, but they are {sorted(_KEYS)}. Use those."
        )
    if reason := _violation_in_entry(entry):
        raise ReportError(f"known failure {entry['id']!r:.60}: {reason}. Correct the entry.")
    words = {word: entry[word] for word in _KEYS - {"devices"}}
    return KnownFailure(devices=tuple(entry["devices"]), **words)


def _violation_in_entry(entry: Mapping[str, Any]) -> str:
    devices, issue = entry["devices"], entry["issue"]
    if not isinstance(devices, list) or not devices or not all(map(is_device, devices)):
        return f"devices is {devices!r:.60}, but these are words such as cpu and cuda"
    if not all(isinstance(entry[word], str) and entry[word].strip() for word in ("id", "reason")):
        return "id or reason is empty or no text, but both are words"
    if not isinstance(issue, str) or not issue.startswith("https://"):
        return f"issue is {issue!r:.120}, but an https address is needed"
    if type(entry["expires"]) is not datetime.date:
        return f"expires is {entry['expires']!r:.60}, but a day, such as 2027-03-01, is needed"
    return ""


def problems(
    known: Iterable[KnownFailure],
    rows: Iterable[Mapping[str, Any]],
    *,
    today: datetime.date | None = None,
) -> list[str]:
    """Say which announcements are not true, given the rows before announcements count."""
    day = today or datetime.date.today()
    outcomes: dict[tuple[str, str], set[str]] = {}
    for row in rows:
        outcomes.setdefault((row["id"], row["device"]), set()).add(row["outcome"])
    return [
        f"{_named(entry.id, device)}: {violation}"
        for entry in known
        for device in entry.devices
        if (violation := _violation(entry, outcomes.get((entry.id, device)), day))
    ]


def notes(known: Iterable[KnownFailure], *, today: datetime.date | None = None) -> list[str]:
    """Say which announcements end soon: from then on a run is not conformant for them."""
    day = today or datetime.date.today()
    return [
        f"note: known failure {entry.id} expires on {entry.expires}; fix it, or announce it again"
        for entry in known
        if day <= entry.expires <= day + NOTICE
    ]


def passes(id: str, device: str) -> str:
    """Give the beginning of the problem that an announced failure did not fail."""
    return f"{_named(id, device)}: {_DID_NOT}"


def _named(id: str, device: str) -> str:
    return f"known failure {id} on {device}"


def _violation(entry: KnownFailure, outcomes: set[str] | None, today: datetime.date) -> str:
    if entry.expires < today:
        return f"expired on {entry.expires}"
    if outcomes is None:
        return "no such requirement was run"
    if "fail" not in outcomes:
        return f"{_DID_NOT} ({', '.join(sorted(outcomes))})"
    return ""
