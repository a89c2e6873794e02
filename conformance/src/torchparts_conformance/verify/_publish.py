"""What is published of reports: themselves, the badges of the first, and the matrix of all.

Everything but the reports follows from them, so that a reader can make it again and compare.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchparts_conformance.render import _badge, _render
from torchparts_conformance.report import _report
from torchparts_conformance.subject import _adapters
from torchparts_conformance.verify import _installed, _verify

REPORTS = "reports"
BADGES = "badges"


def publish(reports: Iterable[Mapping[str, Any]], folder: Path) -> None:
    """Write reports and all that follows from them; what an earlier call wrote is taken away."""
    ordered = sorted(reports, key=_place)
    for path in published_reports(folder):
        path.unlink()
    for report in ordered:
        _render.write(folder / REPORTS / f"{name_of(report)}.json", _report.to_text(report))
    for name, text in derived(ordered).items():
        _render.write(folder / name, text)


def published_reports(folder: Path) -> list[Path]:
    """Give the files of the reports that are published in a folder."""
    return sorted((folder / REPORTS).glob("*.json"))


def name_of(report: Mapping[str, Any]) -> str:
    """Name a report by its adapter, and by its devices where they are not the CPU alone."""
    devices = [] if report["claims"]["devices"] == ["cpu"] else report["claims"]["devices"]
    words = [report["implementation"]["adapter"], *devices]
    return re.sub(r"[^a-z0-9]+", "-", "-".join(words).lower()).strip("-") or "report"


def _place(report: Mapping[str, Any]) -> tuple[int, str]:
    """Order reports as the shipped adapters are, ours first, and others after them by name."""
    shipped = list(_adapters.SHIPPED)
    adapter = report["implementation"]["adapter"]
    place = shipped.index(adapter) if adapter in shipped else len(shipped)
    return place, name_of(report)


def derived(reports: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Give the text of every file that follows from reports, by path below the folder."""
    page, markdown = _render.matrix_texts(reports)
    texts = {"matrix.html": page, "matrix.md": markdown}
    for badge in _badge.badges(reports[0]):
        texts[f"{BADGES}/badge-{badge.area}.json"] = _badge.to_shields(badge)
        texts[f"{BADGES}/badge-{badge.area}.svg"] = _badge.to_svg(badge)
    return texts


def drift(folder: Path) -> list[str]:
    """Say which published report is not to be believed, and which file does not follow from them.

    Raises:
        ReportError: a report cannot be read, or is of another version of the suite.
    """
    paths = published_reports(folder)
    if not paths:
        return [f"{REPORTS} holds no report"]
    reports = {path.name: _report.read(path) for path in paths}
    expected = _installed.expected()
    doubts = [
        f"{name}: {problem}"
        for name, report in reports.items()
        for problem in _verify.problems(report, None, expected)
    ]
    if doubts:
        return doubts
    wanted = derived(sorted(reports.values(), key=_place))
    there = {f"{BADGES}/{path.name}" for path in (folder / BADGES).glob("*")}
    return [
        *(
            f"{name} does not follow from the reports; publish again"
            for name in _render.stale(folder, wanted)
        ),
        *(f"{name} belongs to no report" for name in sorted(there - wanted.keys())),
    ]
