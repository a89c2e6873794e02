"""The report of a run: rows with outcomes, and the verdicts computed from them.

Requirements that are not provided or not claimed are not counted. A profile of an area is
conformant on a device if every counted MUST passed, no case was left out, and the run had no
problem. The verdict of the report is that of core; the exit code is about every profile that was
run.
"""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import torchparts_conformance
from torchparts_conformance._errors import (
    CONFORMANT,
    NO_DEVICE,
    NOT_CONFORMANT,
    ReportError,
    printable,
)
from torchparts_conformance.requirements._areas import AREAS, CORE, LEVELS, profile_order
from torchparts_conformance.requirements._cases import load_registry
from torchparts_conformance.requirements._requirement import Requirement

FORMAT = "torchparts-conformance report 2"
MAX_BYTES = 16 << 20
MAX_TEXT = 500
# Worst first: the outcome of a requirement is the worst of its cases.
OUTCOMES = (
    *("error", "fail", "xpass", "not_run", "xfail"),
    *("not_provided", "no_device", "not_claimed", "pass"),
)
UNCOUNTED = ("not_provided", "not_claimed")
EXIT_CODES = {
    "conformant": CONFORMANT,
    "announced failures": CONFORMANT,
    "not conformant": NOT_CONFORMANT,
    "not provided": NOT_CONFORMANT,
    "no device": NO_DEVICE,
}
_KEYS = ("date", "suite", "implementation", "environment", "claims", "rows", "problems")
_TEXTS_OF_ROW = ("id", "case", "device", "outcome", "reason", "where")


def build(
    *,
    implementation: Mapping[str, Any],
    environment: Mapping[str, Any],
    claims: Mapping[str, Any],
    rows: Iterable[Mapping[str, Any]],
    problems: Iterable[str],
    date: str = "",
    suite: str = "",
) -> dict[str, Any]:
    """Build a report; the rows may be in any order."""
    report: dict[str, Any] = {
        "format": FORMAT,
        "date": date or datetime.date.today().isoformat(),
        "suite": suite or torchparts_conformance.__version__,
        "implementation": dict(implementation),
        "environment": dict(environment),
        "claims": dict(claims),
        "rows": sorted((dict(row) for row in rows), key=row_key),
        "problems": sorted(text[:MAX_TEXT] for text in problems),
    }
    return report | derived(report, load_registry())


def row_key(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return the unique key of a row: requirement, case and device."""
    return row["id"], row["case"], row["device"]


def merged(reports: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge reports of one run, each of which ran a share of the cases."""
    first, *others = reports
    rows = {row_key(row): row for row in first["rows"]}
    for report in others:
        rows |= {row_key(row): row for row in report["rows"] if row["outcome"] != "not_run"}
    problems = {text for report in (first, *others) for text in report["problems"]}
    facts = {word: first[word] for word in _KEYS if word not in ("rows", "problems")}
    return build(**facts, rows=rows.values(), problems=problems)


def worst(outcomes: Iterable[str]) -> str:
    """Return the outcome of a requirement from those of its cases."""
    return min(outcomes, key=OUTCOMES.index)


def outcomes_by_id(rows: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return the outcome of each requirement from rows of one device."""
    found: dict[str, list[str]] = {}
    for row in rows:
        found.setdefault(row["id"], []).append(row["outcome"])
    return {id: worst(outcomes) for id, outcomes in found.items()}


def derived(report: Mapping[str, Any], registry: Mapping[str, Requirement]) -> dict[str, Any]:
    """Compute the verdicts from rows and problems of a report."""
    verdicts = []
    for device in report["claims"]["devices"]:
        of_device = outcomes_by_id(row for row in report["rows"] if row["device"] == device)
        ordered = sorted(((registry[id], o) for id, o in of_device.items()), key=_place)
        for (area, profile), found in groupby(ordered, key=lambda e: (e[0].area, e[0].profile)):
            facts = {"area": area, "profile": profile, "device": device}
            verdicts.append(facts | _verdict(list(found), sound=not report["problems"]))
    core = [v for v in verdicts if v["profile"] == CORE]
    rows = [row for row in report["rows"] if registry[row["id"]].profile == CORE]
    return {"verdicts": verdicts, "verdict": _overall(core, rows, report["problems"])}


def _place(entry: tuple[Requirement, str]) -> tuple[int, tuple[int, str]]:
    return AREAS.index(entry[0].area), profile_order(entry[0].profile)


def _verdict(found: list[tuple[Requirement, str]], *, sound: bool) -> dict[str, Any]:
    """Judge one profile of one area on one device, and count its requirements by level."""
    counted = [(r, outcome) for r, outcome in found if outcome not in UNCOUNTED]
    counts = {}
    for level in LEVELS:
        outcomes = [outcome for r, outcome in counted if r.level == level]
        counts[level.lower()] = [outcomes.count("pass"), len(outcomes)]
    absent = sum(outcome == "not_provided" for _, outcome in found)
    return {"verdict": _word(found, counted, sound), **counts, "not_provided": absent}


def _word(
    found: list[tuple[Requirement, str]], counted: list[tuple[Requirement, str]], sound: bool
) -> str:
    outcomes = {outcome for _, outcome in counted}
    if not counted:
        is_claimed = any(outcome != "not_claimed" for _, outcome in found)
        return "not provided" if is_claimed else "not claimed"
    if outcomes == {"no_device"}:
        return "no device"
    must = {outcome for r, outcome in counted if r.level == "MUST"}
    is_whole = outcomes.isdisjoint(("not_run", "no_device", "xpass"))
    return "conformant" if sound and is_whole and must <= {"pass"} else "not conformant"


def _overall(
    verdicts: Iterable[Mapping[str, Any]], rows: Iterable[Mapping[str, Any]], problems: list[str]
) -> str:
    words = {v["verdict"] for v in verdicts} - {"not claimed", "not provided"}
    if problems:
        return "not conformant"
    if not words:
        return "not provided"
    if words <= {"conformant", "no device"}:
        return "no device" if "no device" in words else "conformant"
    # A known failure is not a pass; it only keeps the exit code at 0.
    allowed = {"pass", "xfail", *UNCOUNTED}
    announced = all(row["outcome"] in allowed for row in rows)
    return "announced failures" if announced else "not conformant"


def counts_of(verdict: Mapping[str, Any]) -> str:
    """Return how many MUSTs of a profile passed, such as `core 17 of 17 (2 not provided)`."""
    passed, counted = verdict["must"]
    absent = f" ({verdict['not_provided']} not provided)" if verdict["not_provided"] else ""
    return f"{verdict['profile']} {passed} of {counted}{absent}"


def judged(report: Mapping[str, Any], area: str) -> list[Mapping[str, Any]]:
    """Return the verdicts of an area for profiles that were provided and claimed."""
    verdicts = [v for v in report["verdicts"] if v["area"] == area]
    return [v for v in verdicts if v["verdict"] not in ("not claimed", "not provided")]


def exit_code(report: Mapping[str, Any]) -> int:
    """Return the exit code of a run with this report, about every profile that was run."""
    return EXIT_CODES[_overall(report["verdicts"], report["rows"], report["problems"])]


def to_text(report: Mapping[str, Any]) -> str:
    """Format a report for storage, one line per row."""
    lines = (f"{json.dumps(word)}: {_lines(report[word])}" for word in sorted(report))
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _lines(value: Any) -> str:
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(f" {json.dumps(e, sort_keys=True)}" for e in value) + "\n]"
    return json.dumps(value, sort_keys=True)


def read(path: Path) -> dict[str, Any]:
    """Read a report, which may have been edited, and check it."""
    name = f"report {path.name!r:.100}"
    text = read_text(path, role="report", max_bytes=MAX_BYTES)
    try:
        report = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ReportError(f"{name} is not a complete JSON file: {error!s:.120}.") from error
    if not isinstance(report, dict) or report.get("format") != FORMAT:
        raise ReportError(f"{name} is not a report of this suite, whose format is {FORMAT!r}.")
    if report.get("suite") != torchparts_conformance.__version__:
        raise ReportError(
            f"{name} is of suite {report.get('suite')!r:.40}; installed is "
            f"{torchparts_conformance.__version__!r}. Install the version that wrote it."
        )
    try:
        if not all(_is_row(row) for row in report["rows"]):
            raise ValueError(
                "a row has wrong keys, an unknown outcome or a time that is not a number"
            )
        if not {"name", "version", "adapter"} <= report["implementation"].keys():
            raise ValueError("the implementation lacks name, version or adapter")
        if not isinstance(report["environment"]["torch"], str) or len(report["date"]) != 10:
            raise ValueError("the environment or the date has the wrong form")
        registry = load_registry()
        if unknown := [row["id"] for row in report["rows"] if row["id"] not in registry]:
            raise ValueError(f"{unknown[0]:.20} is not a requirement of this suite")
        again = derived(report, registry)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ReportError(
            f"{name} is incomplete or has the wrong form: {type(error).__name__} {error!s:.120}."
        ) from error
    if any(report.get(word) != value for word, value in again.items()):
        raise ReportError(f"{name}: its verdicts do not follow from its rows. It was edited.")
    return report


def _is_row(row: Mapping[str, Any]) -> bool:
    return (
        row.keys() == {*_TEXTS_OF_ROW, "duration_s"}
        and all(isinstance(row[word], str) for word in _TEXTS_OF_ROW)
        and isinstance(row["duration_s"], (int, float))
        and row["outcome"] in OUTCOMES
    )


def title(report: Mapping[str, Any]) -> str:
    """Return name and version of the implementation as printable text."""
    who = report["implementation"]
    return printable(f"{who['name']} {who['version']}")[:200]


def read_text(path: Path, *, role: str, max_bytes: int) -> str:
    """Read a UTF-8 file, up to a size limit."""
    name = f"{role} {path.name!r:.200}"
    if path.exists() and not path.is_file():
        raise ReportError(f"{name} is not a regular file.")
    try:
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
        if len(content) > max_bytes:
            raise ReportError(f"{name} is larger than {max_bytes} bytes.")
        return content.decode("utf-8")
    except ReportError:
        raise
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ReportError(f"{name} cannot be read: {reason:.120}.") from error


def write(path: Path, text: str) -> None:
    """Write a temporary file and move it in place, so that no reader sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(text, encoding="utf-8", newline="\n")
    os.replace(beside, path)
