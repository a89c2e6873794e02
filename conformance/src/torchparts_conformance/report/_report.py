"""The report: its content, its verdicts, its digest, and how it is read back.

- Verdicts, digest and seal can be derived again from the rest.
- The digest leaves out the date, times, reasons and lines of files, so that two runs of the same
  code agree.
- The seal covers everything but itself, so that an edited file shows.
- A row that is not claimed has no reason: its profile and the claims say it, and there are hundreds
  of such rows.
"""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from torchparts_conformance import _console
from torchparts_conformance._errors import ReportError
from torchparts_conformance._package import PACKAGE
from torchparts_conformance.report import _outcomes, _schema, _untrusted_file
from torchparts_conformance.requirements._areas import AREAS, CLAIMED_BY_ALL, LEVELS
from torchparts_conformance.subject._claims import not_claimed

SCHEMA = "urn:torchparts:conformance:report:1"
SCHEMA_FILE = PACKAGE / "schemas" / "report-1.json"
SUITE = "torchparts-conformance"
MAX_BYTES = 16 << 20
MAX_REASON = 500
MAX_WHERE = 300
MAX_PROBLEMS = 1000
_NOT_COMPARED = ("duration_s", "reason", "where")
# What no announcement excuses, at whatever level.
_UNANNOUNCED = {"not_run", "not_provided", "xpass"}
EXIT_CODES = {
    _outcomes.CONFORMANT: _console.CONFORMANT,
    "announced failures": _console.CONFORMANT,
    _outcomes.NOT_CONFORMANT: _console.NOT_CONFORMANT,
    _outcomes.NOT_PROVIDED: _console.NOT_CONFORMANT,
    _outcomes.NO_DEVICE: _console.NO_DEVICE,
}


def build(
    *,
    suite: Mapping[str, Any],
    implementation: Mapping[str, Any],
    environment: Mapping[str, Any],
    claims: Mapping[str, Any],
    rows: Iterable[Mapping[str, Any]],
    problems: Iterable[str],
) -> dict[str, Any]:
    """Put a report together; the rows may come in any order."""
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "date": datetime.date.today().isoformat(),
        "suite": dict(suite),
        "implementation": dict(implementation),
        "environment": dict(environment),
        "claims": dict(claims),
        "rows": sorted((dict(row) for row in rows), key=row_key),
        "problems": [text[:MAX_REASON] for text in sorted(problems)[:MAX_PROBLEMS]],
        "complete": True,
    }
    report |= derived(report)
    return {**report, "seal": seal(report)}


def row_key(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """Give what makes a row unique: requirement, case and device."""
    return row["id"], row["case"], row["device"]


def reason_of(row: Mapping[str, Any]) -> str:
    """Return why a row has its outcome, also for a row that is not claimed."""
    is_told = row["reason"] or row["outcome"] != "not_claimed"
    return row["reason"] if is_told else not_claimed(row["profile"])


def canonical(value: Any) -> str:
    """Write JSON in the one way that is hashed: sorted keys, no spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def derived(report: Mapping[str, Any]) -> dict[str, Any]:
    """Give verdicts, overall verdict and digest of the rest of a report."""
    sound = not report["problems"]
    verdicts = [
        _verdict(key, list(rows), sound=sound)
        for key, rows in groupby(sorted(report["rows"], key=_group_key), key=_group_key)
    ]
    judged = {**report, "verdicts": verdicts, "verdict": _overall(report, verdicts)}
    return {
        "verdicts": verdicts,
        "verdict": judged["verdict"],
        "digest": digest(judged),
    }


_Key = tuple[int, int, str, str, str]


def _group_key(row: Mapping[str, Any]) -> _Key:
    """Order by area, then core, robust and the capabilities by name, then group and device."""
    profile = row["profile"]
    order = CLAIMED_BY_ALL.index(profile) if profile in CLAIMED_BY_ALL else len(CLAIMED_BY_ALL)
    return AREAS.index(row["area"]), order, profile, row["group"], row["device"]


def _verdict(key: _Key, rows: list[Mapping[str, Any]], *, sound: bool) -> dict[str, Any]:
    area, _, profile, group, device = key
    counts = {level.lower(): _passed(rows, level) for level in LEVELS}
    word = _outcomes.profile_verdict(rows, sound=sound)
    where = {"area": AREAS[area], "profile": profile, "group": group, "device": device}
    return {**where, "verdict": word, **counts}


def _passed(rows: Iterable[Mapping[str, Any]], level: str) -> list[int]:
    """Count requirements of a level: those whose every case passed, and all."""
    outcomes: dict[str, list[str]] = {}
    for row in rows:
        if row["level"] == level:
            outcomes.setdefault(row["id"], []).append(row["outcome"])
    worst = [_outcomes.worst(found) for found in outcomes.values()]
    return [worst.count("pass"), len(worst)]


def _overall(report: Mapping[str, Any], verdicts: Iterable[Mapping[str, Any]]) -> str:
    absent = _outcomes.absent(report["rows"])
    there = [v["verdict"] for v in verdicts if (v["area"], v["group"]) not in absent]
    words = set(there) - {_outcomes.NOT_CLAIMED}
    if not words:
        return _outcomes.NOT_PROVIDED
    if words == {_outcomes.CONFORMANT}:
        return _outcomes.CONFORMANT
    if not words & {_outcomes.NOT_CONFORMANT, _outcomes.NOT_PROVIDED}:
        return _outcomes.NO_DEVICE
    rows = [row for row in report["rows"] if (row["area"], row["group"]) not in absent]
    must = {row["outcome"] for row in rows if row["level"] == "MUST"}
    every = {row["outcome"] for row in rows}
    sound = not report["problems"]
    announced = must <= {"pass", "xfail", "not_claimed"} and not every & _UNANNOUNCED
    return "announced failures" if sound and announced else _outcomes.NOT_CONFORMANT


def digest(report: Mapping[str, Any]) -> str:
    """Fingerprint a report without its date, times, reasons and lines of files."""
    left_out = ("date", "digest", "seal")
    kept = {key: value for key, value in report.items() if key not in left_out}
    rows = [
        {key: value for key, value in row.items() if key not in _NOT_COMPARED}
        for row in report["rows"]
    ]
    return hashlib.sha256(canonical({**kept, "rows": rows}).encode()).hexdigest()


def seal(report: Mapping[str, Any]) -> str:
    """Fingerprint a report with everything but the seal itself."""
    kept = {key: value for key, value in report.items() if key != "seal"}
    return hashlib.sha256(canonical(kept).encode()).hexdigest()


def to_text(report: Mapping[str, Any]) -> str:
    """Write a report as it is stored, a line for each row; equal reports give equal bytes."""
    lines = (f"{json.dumps(word)}: {_lines(report[word])}" for word in sorted(report))
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _lines(value: Any) -> str:
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(f" {canonical(entry)}" for entry in value) + "\n]"
    return canonical(value)


def read(path: Path) -> dict[str, Any]:
    """Read and check a report that may come from a stranger.

    Raises:
        ReportError: it is missing, too large, cut short, or not a report of this version.
    """
    return parse(_untrusted_file.read_text(path, role="report", max_bytes=MAX_BYTES), path.name)


def parse(text: str, name: str) -> dict[str, Any]:
    """Check the text of a report that may come from a stranger.

    Raises:
        ReportError: it is cut short, or not a report of this version.
    """
    try:
        data = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise ReportError(
            f"report {name!r:.200} is no whole JSON file: {error!s:.120}. Make it again."
        ) from error
    return _checked(data, name)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse a key that is there twice: another reader might take the other value."""
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a key is there twice")
    return made


def _no_constant(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")


def _checked(data: Any, name: str) -> dict[str, Any]:
    version = data.get("schema") if isinstance(data, dict) else None
    if version != SCHEMA:
        raise ReportError(
            f"report {name!r:.200} has schema {version!r:.80}, but this suite reads {SCHEMA!r}. "
            "Use the suite that wrote it."
        )
    schema = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))
    if reason := _schema.violation(data, schema):
        raise ReportError(f"report {name!r:.200} breaks its schema: {reason:.300}. Make it again.")
    return data


def exit_code(report: Mapping[str, Any]) -> int:
    """Give the exit code of a run with this report."""
    return EXIT_CODES[report["verdict"]]
