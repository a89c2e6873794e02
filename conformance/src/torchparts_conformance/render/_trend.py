"""How one implementation did over versions of the suite and of torch, from its reports.

Rule 1: a point is a list, a torch and a version of the implementation; of two reports of one point
the later given counts.
Rule 2: nothing is made up between points. What was not asked for or not provided has no count.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from packaging.version import InvalidVersion, Version

from torchparts_conformance.render._text import markdown
from torchparts_conformance.report import _outcomes
from torchparts_conformance.requirements._registry import AREAS
from torchparts_conformance.subject._identity import printable

_SHOWN = 8
_HEAD = """# Trend

How the same implementation did over versions of the suite and of torch.
It uses the published reports, those in `past`, which were published earlier or made on another
torch, and those of [the list](registry/index.md).

A cell counts the MUST requirements that passed, out of all that applied.
In a picture, a count covers all profiles of an area that the implementation claims and has; a ring
marks a point at which not all of these are conformant.
`torchparts-conformance trend docs/conformance` writes this page.

"""


@dataclass(frozen=True)
class Point:
    """Where a report stands: the version whose list judged, torch's, and the implementation's."""

    suite: str
    torch: str
    version: str

    @property
    def order(self) -> tuple[Any, ...]:
        """What points are sorted by: suite, torch, implementation; what is no version last."""
        return tuple(map(_order, (self.suite, self.torch, self.version)))

    @property
    def label(self) -> str:
        """What is said of it at the head of a column."""
        return f"suite {self.suite}, torch {self.torch}"


@dataclass(frozen=True)
class Count:
    """What passed of what was asked, and whether all of it is conformant."""

    passed: int
    total: int
    is_conformant: bool

    @property
    def share(self) -> float:
        """The part that passed, from 0 to 1."""
        return self.passed / self.total if self.total else 0.0


@dataclass(frozen=True)
class Step:
    """What changed from one point to the next: ids that pass since, do not, came, and went."""

    since: tuple[str, ...]
    lost: tuple[str, ...]
    came: tuple[str, ...]
    gone: tuple[str, ...]


@dataclass(frozen=True)
class Trend:
    """One implementation on one kind of device, over its points in order."""

    name: str
    device: str
    reports: Mapping[Point, Mapping[str, Any]]

    @property
    def points(self) -> tuple[Point, ...]:
        """Where its reports stand, oldest first."""
        return tuple(sorted(self.reports, key=lambda point: point.order))

    def areas(self) -> dict[str, dict[Point, Count]]:
        """Give the count of each area at each point where something of it is there."""
        found = {
            area: {p: c for p in self.points if (c := _count(self._judged(p, area)))}
            for area in AREAS
        }
        return {area: counts for area, counts in found.items() if counts}

    def profiles(self) -> dict[tuple[str, str, str], dict[Point, Count]]:
        """Give the same for each area, profile and group."""
        found: dict[tuple[str, str, str], dict[Point, Count]] = {}
        for area in AREAS:
            for point in self.points:
                for v in self._judged(point, area):
                    key = (v["area"], v["profile"], v["group"])
                    found.setdefault(key, {})[point] = _count([v]) or Count(0, 0, False)
        return found

    def _judged(self, point: Point, area: str) -> list[Mapping[str, Any]]:
        words = (_outcomes.NOT_CLAIMED, _outcomes.NOT_PROVIDED, _outcomes.NO_DEVICE)
        return [
            v
            for v in self.reports[point]["verdicts"]
            if (v["area"], v["device"]) == (area, self.device) and v["verdict"] not in words
        ]

    def steps(self) -> list[tuple[Point, Point, Step]]:
        """Give what changed between each two points that follow each other."""
        points = self.points
        return [
            (before, after, _step(self._passing(before), self._passing(after)))
            for before, after in itertools.pairwise(points)
        ]

    def _passing(self, point: Point) -> dict[str, bool]:
        rows: dict[str, list[str]] = {}
        for row in self.reports[point]["rows"]:
            if row["device"] == self.device:
                rows.setdefault(row["id"], []).append(row["outcome"])
        return {id: _outcomes.worst(found) == "pass" for id, found in rows.items()}


def _order(version: str) -> tuple[bool, Version, str]:
    try:
        return False, Version(version), ""
    except InvalidVersion:
        return True, Version("0"), version


def _count(verdicts: Sequence[Mapping[str, Any]]) -> Count | None:
    if not verdicts:
        return None
    passed, total = (sum(v["must"][part] for v in verdicts) for part in (0, 1))
    return Count(passed, total, all(v["verdict"] == _outcomes.CONFORMANT for v in verdicts))


def _step(before: Mapping[str, bool], after: Mapping[str, bool]) -> Step:
    both = sorted(before.keys() & after.keys())
    return Step(
        tuple(id for id in both if after[id] and not before[id]),
        tuple(id for id in both if before[id] and not after[id]),
        tuple(sorted(after.keys() - before.keys())),
        tuple(sorted(before.keys() - after.keys())),
    )


def point_of(report: Mapping[str, Any]) -> Point:
    """Give where a report stands; of torch the minor version counts."""
    suite, torch = report["suite"], printable(report["environment"]["torch"])
    minor = re.match(r"\d+\.\d+", torch)
    return Point(
        printable(suite.get("list", suite)["version"]),
        minor[0] if minor else torch,
        printable(report["implementation"]["version"]),
    )


def trends(reports: Iterable[Mapping[str, Any]]) -> list[Trend]:
    """Put reports of one implementation and device together, in the order they were given."""
    found: dict[tuple[str, str], dict[Point, Mapping[str, Any]]] = {}
    for report in reports:
        for device in report["claims"]["devices"]:
            key = (printable(report["implementation"]["name"]), device)
            found.setdefault(key, {})[point_of(report)] = report
    made = [Trend(name, device, points) for (name, device), points in found.items()]
    return [trend for trend in made if trend.areas()]


def slug(trend: Trend) -> str:
    """Give a trend's name as a word of an address."""
    return re.sub(r"[^a-z0-9]+", "-", f"{trend.name} {trend.device}".lower()).strip("-")


def to_markdown(made: Sequence[Trend], pictures: Mapping[str, str]) -> str:
    """Write the page.

    Args:
        made: the trends, in the order of the page.
        pictures: by slug, the path of the picture of each that has one.
    """
    points = {point for trend in made for point in trend.points}
    suites = sorted({point.suite for point in points}, key=_order)
    torchs = sorted({point.torch for point in points}, key=_order)
    there = f"Versions of the suite: {markdown(', '.join(suites))}. "
    there += f"Versions of torch: {markdown(', '.join(torchs))}.\n"
    if len(suites) < 2:
        there += (
            "There is one version of the suite so far, so nothing differs between versions yet.\n"
        )
    if any(map(_is_of_two_states, made)):
        there += (
            "Some reports of one version were made with different states of it: requirements that "
            "came or went between them were added to or removed from the suite.\n"
        )
    single = [trend for trend in made if len(trend.points) < 2]
    text = _HEAD + there
    text += "".join(_section(t, pictures) for t in made if t not in single)
    if single:
        names = ", ".join(markdown(f"{t.name} on {t.device}") for t in single)
        text += "\n## Seen once\n\n"
        text += f"Each of these has one report, in the [matrix](matrix.md): {names}.\n"
    return text


def _is_of_two_states(trend: Trend) -> bool:
    """Whether reports say the same version of the suite, but not the same files of it."""
    suites = [
        (r["suite"]["version"], r["suite"]["manifest_sha256"]) for r in trend.reports.values()
    ]
    return len(set(suites)) > len({version for version, _ in suites})


def _section(trend: Trend, pictures: Mapping[str, str]) -> str:
    points = trend.points
    titles = [markdown(p.label + _version_of(p, points)) for p in points]
    name = markdown(f"{trend.name}, {trend.device}")
    rows = [
        f"| {' '.join(filter(None, key))} | "
        + " | ".join(_cell(counts.get(point)) for point in points)
        + " |"
        for key, counts in trend.profiles().items()
    ]
    picture = pictures.get(slug(trend))
    return "\n".join(
        [
            *("", f"## {name}", ""),
            *([f"![{name}: what passed, by area]({picture})", ""] if picture else ()),
            f"| profile | {' | '.join(titles)} |",
            "|---|" + "---|" * len(points),
            *rows,
            "",
            *(_told(*step) for step in trend.steps()),
            "",
        ]
    )


def _version_of(point: Point, points: Sequence[Point]) -> str:
    """Name the implementation's version where there are several, and torch's does not say it."""
    is_said = all(p.version.startswith(p.torch) for p in points)
    return "" if is_said or len({p.version for p in points}) == 1 else f", version {point.version}"


def _cell(count: Count | None) -> str:
    if count is None:
        return "-"
    word = _outcomes.CONFORMANT if count.is_conformant else _outcomes.NOT_CONFORMANT
    return f"{word} {count.passed}/{count.total}"


def _told(before: Point, after: Point, step: Step) -> str:
    words = {
        "pass since": step.since,
        "no longer pass": step.lost,
        "came": step.came,
        "went": step.gone,
    }
    said = "; ".join(f"{_some(ids)} {word}" for word, ids in words.items() if ids)
    return f"- {markdown(before.label)} to {markdown(after.label)}: {said or 'nothing changed'}."


def _some(ids: Sequence[str]) -> str:
    more = f" and {len(ids) - _SHOWN} more" if len(ids) > _SHOWN else ""
    return ", ".join(ids[:_SHOWN]) + more
