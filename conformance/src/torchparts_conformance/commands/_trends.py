"""The command that draws how implementations did over versions; it gives an exit code.

`past/` beside the published reports holds those that were published before, or were made on another
torch. A report of an older suite cannot be held against this one; it has to agree with itself.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchparts_conformance import _console
from torchparts_conformance._errors import OptionError, ReportError
from torchparts_conformance.listing import _entry, _page
from torchparts_conformance.render import _render, _trend, _trend_svg
from torchparts_conformance.report import _report
from torchparts_conformance.verify import _publish, _verify

PAST, PAGE, PICTURES, LIST = "past", "trend.md", "trend", "registry"
_Reports = Sequence[Mapping[str, Any]]
# What somebody else's run agreed with, or has been agreed with.
_SEEN_AGAIN = (_entry.VERIFIED, _entry.FAILED, "expired")


def trend(arguments: argparse.Namespace) -> int:
    """Keep reports, and draw how each implementation did over suites and torchs."""
    folder: Path = arguments.folder
    if not folder.is_dir():
        raise OptionError(
            f"{str(folder)!r:.80} is no folder, but that of the suite's pages is needed. Name it."
        )
    if arguments.check:
        if arguments.reports:
            raise OptionError(
                "trend: reports and --check were both given, but it takes one of them. Name "
                "reports to keep them, or add --check."
            )
        return _console.fail(drift(folder), _console.NOT_CONFORMANT)
    reports = [(path, _report.read(path)) for path in arguments.reports]
    for path, report in reports:
        if doubts := doubts_of(report):
            raise ReportError(
                f"report {path.name!r:.80}: {doubts[0]}, but what is kept cannot be made again. "
                "Run whole areas with an unchanged suite, and name that report."
            )
    keep([report for _, report in reports], folder)
    write(folder)
    return 0


def doubts_of(report: Mapping[str, Any]) -> list[str]:
    """Say why a report of whatever suite is not kept, or give an empty list."""
    found = list(_verify.contradictions(report))
    found += [] if report["suite"]["frozen"] else ["the suite was not as it had been frozen"]
    found += [f"the run had problems ({text:.100})" for text in report["problems"][:1]]
    left_out = any(row["outcome"] == "not_run" for row in report["rows"])
    return [*found, *(["cases were left out"] if left_out else [])]


def keep(reports: Iterable[Mapping[str, Any]], folder: Path) -> None:
    """Put reports among those that were published before; one of the same point is replaced."""
    for report in reports:
        point = _trend.point_of(report)
        words = (
            _publish.name_of(report),
            point.version,
            "suite",
            point.suite,
            "torch",
            point.torch,
        )
        name = re.sub(r"[^a-z0-9.]+", "-", "-".join(words).lower()).strip("-.")
        _render.write(folder / PAST / f"{name}.json", _report.to_text(report))


def keep_replaced(folder: Path, coming: _Reports) -> None:
    """Keep those published reports whose point none of the coming ones is of."""
    there = {(_publish.name_of(report), _trend.point_of(report)) for report in coming}
    published = map(_report.read, _publish.published_reports(folder))
    keep([r for r in published if (_publish.name_of(r), _trend.point_of(r)) not in there], folder)


def gathered(folder: Path) -> list[dict[str, Any]]:
    """Give every report that a trend is drawn from: the past, the list, what is published.

    Raises:
        ReportError: one cannot be read.
    """
    past = sorted((folder / PAST).glob("*.json"))
    listed = _page.entries(folder / LIST).values() if (folder / LIST).is_dir() else ()
    return [
        *map(_report.read, past),
        *(dict(e.report) for e in listed if e.label(_entry.Day.min) in _SEEN_AGAIN),
        *map(_report.read, _publish.published_reports(folder)),
    ]


def files(folder: Path) -> dict[str, str]:
    """Give the page and its pictures, by path below the folder."""
    made = _trend.trends(gathered(folder))
    drawn = {
        f"{PICTURES}/{_trend.slug(t)}.svg": _trend_svg.to_svg(t) for t in made if len(t.points) > 1
    }
    pictures = {Path(name).stem: name for name in drawn}
    return {PAGE: _trend.to_markdown(made, pictures), **drawn}


def write(folder: Path) -> None:
    """Write the page and its pictures; pictures of nothing any more are taken away."""
    wanted = files(folder)
    for path in (folder / PICTURES).glob("*.svg"):
        if f"{PICTURES}/{path.name}" not in wanted:
            path.unlink()
    for name, text in wanted.items():
        _render.write(folder / name, text)


def drift(folder: Path) -> list[str]:
    """Name what does not follow from the reports, and kept reports that contradict themselves."""
    wanted = files(folder)
    doubts = [
        f"{PAST}/{path.name}: {text}"
        for path in sorted((folder / PAST).glob("*.json"))
        for text in doubts_of(_report.read(path))
    ]
    there = {f"{PICTURES}/{path.name}" for path in (folder / PICTURES).glob("*")}
    return [
        *doubts,
        *(
            f"{name} does not follow from the reports; write it again"
            for name in _render.stale(folder, wanted)
        ),
        *(f"{name} belongs to no report" for name in sorted(there - wanted.keys())),
    ]
