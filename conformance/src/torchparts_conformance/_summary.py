"""The terminal output at the end of a run: failures, verdicts, and the next step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torchparts_conformance import _report
from torchparts_conformance.requirements._areas import CORE, OWN
from torchparts_conformance.requirements._cases import Case, source_tests
from torchparts_conformance.requirements._requirement import Requirement

SHOWN_IN_FULL = 20
_WIDTH = 400
_Rows = Sequence[Mapping[str, Any]]


def summary(report: Mapping[str, Any], registry: Mapping[str, Requirement]) -> list[str]:
    """Return failures by reason, a verdict for each area, problems, and the verdict on core."""
    return [
        *_failures(report, registry),
        *_not_run(report),
        *verdicts(report),
        *_beside(report),
        *report["problems"],
        f"{report['implementation']['name']}: {report['verdict']}",
    ]


def verdicts(report: Mapping[str, Any]) -> Iterator[str]:
    """Return a line for each area and device, and one for areas of which nothing was judged."""
    absent = []
    for area in report["claims"]["areas"]:
        judged = _report.judged(report, area)
        if not judged:
            absent.append(area)
        for v in judged:
            if v["profile"] == CORE:
                yield f"{area:<13} {v['device']:<5} {v['verdict']}: {_counts(v)}"
    if absent:
        yield f"not provided: {', '.join(absent)}"


def _beside(report: Mapping[str, Any]) -> Iterator[str]:
    """Return what was run beside core, by area and device."""
    is_first = True
    for area in report["claims"]["areas"]:
        for device in report["claims"]["devices"]:
            judged = [v for v in _report.judged(report, area) if v["device"] == device]
            if own := [_counts(v) for v in judged if v["profile"] != CORE]:
                if is_first:
                    yield f"beside it; {OWN}:"
                is_first = False
                yield f"{area:<13} {device:<5} {'; '.join(own)}"
    if is_first and any(row["outcome"] == "not_claimed" for row in report["rows"]):
        yield "torchparts' own requirements were not run; add --profile all to see them beside it"


def _counts(verdict: Mapping[str, Any]) -> str:
    passed, counted = verdict["should"]
    should = f" (SHOULD {passed} of {counted})" if counted else ""
    return f"{_report.counts_of(verdict)}{should}"


def _failures(report: Mapping[str, Any], registry: Mapping[str, Requirement]) -> Iterator[str]:
    """Show each reason once, and each requirement once; those of core come first."""
    together: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    shown: set[str] = set()
    for row in sorted(report["rows"], key=lambda row: registry[row["id"]].profile != CORE):
        reason = row["outcome"], row["reason"]
        if row["outcome"] in ("error", "fail", "xpass") and row["id"] not in shown:
            together.setdefault(reason, []).append(row)
            shown.add(row["id"])
    for number, rows in enumerate(together.values()):
        if number < SHOWN_IN_FULL:
            yield from _failure(rows, registry, report["implementation"]["adapter"])
            yield ""
        else:
            yield f"{', '.join(_ids(rows))} {rows[0]['outcome']}: {rows[0]['reason']:.{_WIDTH}}"


def _not_run(report: Mapping[str, Any]) -> Iterator[str]:
    if not_run := _ids([row for row in report["rows"] if row["outcome"] == "not_run"]):
        yield f"not run: {len(not_run)} requirements, {', '.join(not_run[:5])} ..."


def _failure(rows: _Rows, registry: Mapping[str, Requirement], adapter: str) -> Iterator[str]:
    first, *others = _ids(rows)
    requirement, row = registry[first], rows[0]
    yield f"{first} {requirement.level} {requirement.profile}, {row['device']}: {row['outcome']}"
    yield f"  {requirement.text}"
    if row["reason"]:
        yield f"  {row['reason']:.{_WIDTH}}"
    if row["where"]:
        yield f"  at      {row['where']}"
    if others:
        yield f"  also    {', '.join(others)}"
    yield f"  repeat  torchparts-conformance run --impl {adapter} --explain {first}"


def _ids(rows: _Rows) -> list[str]:
    return list(dict.fromkeys(row["id"] for row in rows))


def explained(requirement: Requirement, cases: Iterable[Case]) -> list[str]:
    """Return the static information about a requirement."""
    place = source_tests().get((requirement.area, requirement.source), "")
    source = f"{place}::{requirement.source}" if place else requirement.source
    facts = {
        "profile": f"{requirement.area} {requirement.profile}",
        "why": requirement.rationale,
        "source": source + (f": {requirement.quote}" if requirement.quote else ""),
    }
    lines = [f"  {word:<8} {text}" for word, text in facts.items() if text]
    for case in cases:
        lines += [f"  case     {case.name}: {case.text}", "", *case.code(), ""]
    return [f"{requirement.id}: {requirement.text}", *lines]
