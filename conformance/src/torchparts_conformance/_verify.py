"""Check a report against the installed suite, and run a sample of its requirements again.

A report can be written without running anything. Only another run of the implementation shows
whether its passes are true.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

from torchparts_conformance import _badge, _report
from torchparts_conformance._process import run_cases
from torchparts_conformance.requirements._areas import CORE
from torchparts_conformance.requirements._cases import find_cases, function_of, load_registry


def problems(report: Mapping[str, Any], badge: str | None = None) -> list[str]:
    """Return the contradictions between a report, its badge and the installed suite."""
    found = [*_rows(report), *_claims(report)]
    if badge is not None:
        drawn = _badge.badges(report)
        if badge not in {*map(_badge.to_svg, drawn), *map(_badge.to_shields, drawn)}:
            found.append("the badge does not match this report")
    return found


def _rows(report: Mapping[str, Any]) -> Iterator[str]:
    keys = [_report.row_key(row) for row in report["rows"]]
    if len(keys) != len(set(keys)):
        yield "a row occurs twice"
    there = {(id, function_of(case), device) for id, case, device in keys}
    wanted = set(_wanted(report))
    yield from (f"row {' '.join(key)} is missing" for key in sorted(wanted - there)[:5])
    yield from (f"row {' '.join(key)} is not a case" for key in sorted(there - wanted)[:5])


def _wanted(report: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Return requirement, case and device of each row that must be present."""
    registry, claims = load_registry(), report["claims"]
    for case in find_cases():
        for id in case.ids if case.area in claims["areas"] else ():
            for device in claims["devices"]:
                if registry[id].is_for(device):
                    yield id, case.name, device


def _claims(report: Mapping[str, Any]) -> Iterator[str]:
    registry, claims = load_registry(), report["claims"]
    for row in report["rows"]:
        if row["outcome"] == "not_claimed":
            requirement = registry[row["id"]]
            by_default = {CORE, *claims["capabilities"].get(requirement.area, ())}
            if requirement.profile in (claims["profiles"] or by_default):
                yield f"row {row['id']} {row['device']} is of a claimed profile, but not judged"


def sample(report: Mapping[str, Any], count: int, seed: int) -> list[str]:
    """Choose requirements that the report has run, in order of their ids."""
    ran = {row["id"] for row in report["rows"] if row["outcome"] in ("pass", "fail", "error")}
    return sorted(random.Random(seed).sample(sorted(ran), min(count, len(ran))))


def rerun(report: Mapping[str, Any], ids: list[str], *, impl: str, jobs: int) -> list[str]:
    """Run the cases of some requirements again and return the differences.

    Args:
        report: to compare with.
        ids: of the requirements.
        impl: the implementation, named by the person who verifies: a report does not choose
            which code is imported.
        jobs: processes at a time.
    """
    again = run_cases([f"--requirement={','.join(ids)}", *options(report, impl)], jobs=jobs)
    before = _outcomes(report, ids)
    return [
        f"{' '.join(key)} is {before.get(key, 'absent')} in the report, and {outcome} now"
        for key, outcome in _outcomes(again, ids).items()
        if before.get(key) != outcome
    ]


def options(report: Mapping[str, Any], impl: str) -> list[str]:
    """Return the options of the run that made a report."""
    claims = report["claims"]
    found = [f"--impl={impl}", f"--area={','.join(claims['areas'])}"]
    found.append(f"--device={','.join(claims['devices'])}")
    return [*found, f"--profile={','.join(claims['profiles'])}"] if claims["profiles"] else found


def _outcomes(report: Mapping[str, Any], ids: list[str]) -> dict[tuple[str, str, str], str]:
    """Return outcomes by row; a known failure counts as a failure."""
    same = {"xfail": "fail", "xpass": "pass"}
    rows = [row for row in report["rows"] if row["id"] in ids]
    return {_report.row_key(row): same.get(row["outcome"], row["outcome"]) for row in rows}
