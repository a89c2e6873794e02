"""Whether a report and a badge can be what this suite would have written.

This shows that nobody edited them by hand. It does not show that the run took place: whoever can
run the suite can also write a report from nothing. For that there are `--rerun` and a signature.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torchparts_conformance._errors import ReportError
from torchparts_conformance.render import _badge
from torchparts_conformance.report import _report
from torchparts_conformance.requirements._areas import CLAIMED_BY_ALL
from torchparts_conformance.requirements._cases import Case, function_of
from torchparts_conformance.requirements._requirement import Requirement


@dataclass(frozen=True)
class Expected:
    """What the installed suite says a report must agree with."""

    version: str
    registry: Mapping[str, Requirement]
    cases: tuple[Case, ...]
    distribution: str | None = None
    wheel_sha256: str | None = None
    wheel_record_sha256: str | None = None


def problems(report: Mapping[str, Any], badge: str | None, expected: Expected) -> list[str]:
    """Give every reason not to believe a report, or an empty list.

    Args:
        report: as read from its file.
        badge: the text of a badge, JSON or SVG, that is said to belong to it.
        expected: what the installed suite knows.
    Raises:
        ReportError: the report is of another version of the suite, so nothing can be said.
    """
    version = report["suite"]["version"]
    if version != expected.version:
        raise ReportError(
            f"report is of suite {version!r:.60}, but {expected.version!r} is installed. "
            f"Verify it with torchparts-conformance=={version!s:.60}."
        )
    found = [text for check in _CHECKS for text in check(report, expected)]
    if badge is not None and badge not in _drawn(report):
        found.append("the badge is not the one this report gives")
    return found


def _drawn(report: Mapping[str, Any]) -> set[str]:
    drawn = _badge.badges(report)
    return {*map(_badge.to_svg, drawn), *map(_badge.to_shields, drawn)}


def _seals(report: Mapping[str, Any], _: Expected) -> Iterator[str]:
    if report["seal"] != _report.seal(report):
        yield "the seal does not match: the file was changed after it was written"


def _derivations(report: Mapping[str, Any], _: Expected) -> Iterator[str]:
    again = _report.derived(report)
    for word, value in again.items():
        if report[word] != value:
            yield f"{word} does not follow from the rows"


def _rows(report: Mapping[str, Any], expected: Expected) -> Iterator[str]:
    keys = [_report.row_key(row) for row in report["rows"]]
    if len(keys) != len(set(keys)):
        yield "a row is there twice"
    there = {(id, function_of(case), device) for id, case, device in keys}
    wanted = set(_wanted(report, expected))
    yield from (f"row {' '.join(key)} is missing" for key in sorted(wanted - there)[:5])
    yield from (f"row {' '.join(key)} is no case" for key in sorted(there - wanted)[:5])


def _wanted(report: Mapping[str, Any], expected: Expected) -> Iterator[tuple[str, str, str]]:
    """Give requirement, case and device of each row that must be there, without parameters."""
    claims = report["claims"]
    for case in expected.cases:
        for id in case.ids if case.area in claims["areas"] else ():
            for device in claims["devices"]:
                if expected.registry[id].is_for(device):
                    yield id, case.name, device


def _levels(report: Mapping[str, Any], expected: Expected) -> Iterator[str]:
    for row in report["rows"]:
        requirement = expected.registry.get(row["id"])
        facts = (row["area"], row["level"], row["profile"], row["group"])
        r = requirement
        known = r and (r.area, r.level, r.profile, r.group)
        if facts != known:
            yield f"row {row['id']} {row['device']} has another area, level, profile or group"


def _claims(report: Mapping[str, Any], _: Expected) -> Iterator[str]:
    claims = report["claims"]
    for row in report["rows"]:
        if row["outcome"] == "not_claimed":
            claimed = {*CLAIMED_BY_ALL, *claims["capabilities"].get(row["area"], ())}
            chosen = claims["profiles"] is None or row["profile"] in claims["profiles"]
            if chosen and row["profile"] in claimed:
                yield f"row {row['id']} {row['device']} was claimed but is not judged"


def _owner(report: Mapping[str, Any], expected: Expected) -> Iterator[str]:
    wanted = expected.distribution
    names = {
        text
        for found in report["implementation"]["distributions"]
        for text in (found["name"], f"{found['name']}=={found['version']}")
    }
    if wanted is not None and wanted not in names:
        yield f"the report is not about {wanted}"


def _wheel(report: Mapping[str, Any], expected: Expected) -> Iterator[str]:
    if expected.wheel_sha256 is None:
        return
    for found in report["implementation"]["distributions"]:
        if found["wheel_sha256"] == expected.wheel_sha256:
            return
        # Not every installer notes which file it was given: what the file brought is known then.
        noted = found["wheel_sha256"] is None and found["kind"] == "record"
        if noted and found["sha256"] == expected.wheel_record_sha256:
            return
    yield "the report is not about this wheel"


_CHECKS: tuple[Callable[[Mapping[str, Any], Expected], Iterable[str]], ...] = (
    _seals,
    _derivations,
    _rows,
    _levels,
    _claims,
    _owner,
    _wheel,
)
