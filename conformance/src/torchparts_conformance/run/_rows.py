"""The rows of a report: one for each requirement of each case on each device, run or not."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from torchparts_conformance.report import _known_failures, _report
from torchparts_conformance.report._known_failures import KnownFailure
from torchparts_conformance.requirements._cases import Case, function_of
from torchparts_conformance.requirements._requirement import Requirement
from torchparts_conformance.run._case_result import CaseResult


def rows(
    entries: Iterable[CaseResult], *, lacks: Callable[[Requirement], str]
) -> list[dict[str, Any]]:
    """Give the rows of entries in order; what nobody is held to says so, whatever came out."""
    found = [_row(r, entry, lacks(r)) for entry in entries for r in entry.requirements]
    return sorted({_report.row_key(row): row for row in found}.values(), key=_report.row_key)


def _row(requirement: Requirement, entry: CaseResult, lacks: str) -> dict[str, Any]:
    is_judged = lacks != "not_claimed"
    return {
        "id": requirement.id,
        "case": entry.case,
        "device": entry.device,
        "area": requirement.area,
        "level": requirement.level,
        "profile": requirement.profile,
        "group": requirement.group,
        "outcome": lacks or entry.outcome,
        "reason": entry.reason[: _report.MAX_REASON] if is_judged else "",
        "where": entry.where[: _report.MAX_WHERE] if is_judged else "",
        "duration_s": round(entry.duration_s, 3),
    }


def missing(
    entries: Iterable[CaseResult],
    cases: Iterable[Case],
    registry: Mapping[str, Requirement],
    *,
    areas: Collection[str],
    devices: Collection[str],
) -> Iterator[CaseResult]:
    """Give an entry for each case of the areas and devices that pytest did not collect."""
    there = {
        (r.id, function_of(entry.case), entry.device)
        for entry in entries
        for r in entry.requirements
    }
    for case in cases:
        for id in case.ids if case.area in areas else ():
            for device in devices:
                if registry[id].is_for(device) and (id, case.name, device) not in there:
                    yield CaseResult(case.name, device, (registry[id],), reason="was not collected")


def announce(
    found: list[dict[str, Any]], known: Iterable[KnownFailure]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Turn announced failures into xfail and unannounced luck into xpass; give problems too.

    A requirement is announced: one of its cases has to fail, and others may pass. An announced
    crash is still a crash.
    """
    known = list(known)
    problems = _known_failures.problems(known, found)
    announced = {(entry.id, device) for entry in known for device in entry.devices}
    failing = {_where(row) for row in found if row["outcome"] == "fail"}
    becomes = {True: {"fail": "xfail"}, False: {"pass": "xpass"}}
    return [
        {**row, "outcome": becomes[_where(row) in failing].get(row["outcome"], row["outcome"])}
        if _where(row) in announced
        else row
        for row in found
    ], problems


def _where(row: Mapping[str, Any]) -> tuple[str, str]:
    return row["id"], row["device"]
