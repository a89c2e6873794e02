"""Several reports side by side: implementations x devices across, requirements down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchparts_conformance._errors import ReportError
from torchparts_conformance.render._text import markdown
from torchparts_conformance.report import _outcomes
from torchparts_conformance.requirements._requirement import Requirement
from torchparts_conformance.subject._identity import printable

# Each outcome as a sign and a word, so that nothing depends on colour.
SIGNS: Mapping[str, str] = {
    "pass": "\N{CHECK MARK} pass",
    "fail": "\N{BALLOT X} fail",
    "error": "! error",
    "xfail": "~ xfail",
    "xpass": "? xpass",
    "not_claimed": "\N{EN DASH} not claimed",
    "not_provided": "\N{EN DASH} not provided",
    "no_device": "\N{WHITE CIRCLE} no device",
    "not_run": "\N{MIDDLE DOT} not run",
}


@dataclass(frozen=True)
class Cell:
    """What one implementation did about one requirement on one device, and why it failed."""

    outcome: str
    text: str
    reason: str = ""


# Outcomes of which nobody has seen anything.
NOTHING_SEEN = ("not_claimed", "not_provided", "no_device", "not_run")
# Area, profile and group, as they are judged.
Profile = tuple[str, str, str]


@dataclass(frozen=True)
class Counted:
    """A verdict as its word alone, with what passed of all, and both as numbers."""

    word: str
    text: str
    passed: int = 0
    total: int = 0


NOT_RUN = Counted("not run", SIGNS["not_run"])


@dataclass(frozen=True)
class Column:
    """One implementation on one device: verdict by profile and group, cell by requirement."""

    title: str
    device: str
    torch: str
    date: str
    verdicts: Mapping[Profile, Counted]
    cells: Mapping[str, Cell]

    @property
    def name(self) -> str:
        """What tells it from the other columns."""
        return f"{self.title}, {self.device}"

    @property
    def areas(self) -> tuple[str, ...]:
        """Those of which it has something."""
        return tuple(dict.fromkeys(area for (area, _, _), v in self.verdicts.items() if v.total))

    @property
    def passed(self) -> int:
        """How many of those MUST requirements passed that `total` counts."""
        return sum(verdict.passed for verdict in self.verdicts.values())

    @property
    def total(self) -> int:
        """How many MUST requirements there are in the groups that it claims and has a part of."""
        return sum(verdict.total for verdict in self.verdicts.values())


@dataclass(frozen=True)
class Matrix:
    """The table: columns, the requirements that are its rows, and who has no column and why."""

    suite: str
    columns: tuple[Column, ...]
    requirements: tuple[Requirement, ...]
    left_out: tuple[str, ...] = ()


def matrix(reports: Sequence[Mapping[str, Any]], registry: Mapping[str, Requirement]) -> Matrix:
    """Lay reports side by side; areas that none of them ran have no rows.

    Raises:
        ReportError: there is no report, or two are of different suites.
    """
    suites = {report["suite"]["version"] for report in reports}
    if len(suites) != 1:
        raise ReportError(
            f"matrix: {len(reports)} reports are of {len(suites)} suites, but one suite is needed. "
            "Run the others again."
        )
    columns = [
        _column(report, device) for report in reports for device in report["claims"]["devices"]
    ]
    ran = {row["area"] for report in reports for row in report["rows"]}
    return Matrix(
        printable(reports[0]["suite"]["version"]),
        tuple(column for column in columns if not _why_empty(column)),
        tuple(requirement for requirement in registry.values() if requirement.area in ran),
        tuple(f"{c.title} / {c.device}: {why}" for c in columns if (why := _why_empty(c))),
    )


def _why_empty(column: Column) -> str:
    """Say why nothing was run of a column, or give an empty string."""
    cells = list(column.cells.values())
    if any(cell.outcome not in NOTHING_SEEN for cell in cells):
        return ""
    asked = [cell for cell in cells if cell.outcome != "not_claimed"]
    # An area that is not provided is not what there is to say of those that are.
    reasons = [cell.reason for cell in asked if not cell.reason.endswith(" is not provided")]
    return max(reasons, key=reasons.count, default="") or "nothing of it is provided"


def _column(report: Mapping[str, Any], device: str) -> Column:
    who = report["implementation"]
    rows: dict[str, list[Mapping[str, Any]]] = {}
    for row in report["rows"]:
        if row["device"] == device:
            rows.setdefault(row["id"], []).append(row)
    return Column(
        title=f"{printable(who['name'])} {printable(who['version'])}",
        device=device,
        torch=printable(report["environment"]["torch"]),
        date=report["date"],
        verdicts={
            (v["area"], v["profile"], v["group"]): _counted(v)
            for v in report["verdicts"]
            if v["device"] == device
        },
        cells={id: _cell(found) for id, found in rows.items()},
    )


def _counted(verdict: Mapping[str, Any]) -> Counted:
    word, (passed, total) = verdict["verdict"], verdict["must"]
    signs = {_outcomes.NOT_CLAIMED: "not_claimed", _outcomes.NOT_PROVIDED: "not_provided"}
    if word in signs:
        return Counted(word, SIGNS[signs[word]])
    return Counted(word, f"{word} {passed}/{total}", passed, total)


def _cell(rows: Sequence[Mapping[str, Any]]) -> Cell:
    outcome = _outcomes.worst(row["outcome"] for row in rows)
    reason = next((row["reason"] for row in rows if row["outcome"] == outcome), "")
    return Cell(outcome, SIGNS[outcome], printable(reason, limit=500))


def profiles(matrix: Matrix) -> list[Profile]:
    """Give each area, profile and group in order of appearance."""
    return list(dict.fromkeys((r.area, r.profile, r.group) for r in matrix.requirements))


def to_markdown(matrix: Matrix) -> str:
    """Write the matrix as Markdown: who has what, verdicts, then every requirement."""
    titles = [f"{markdown(c.title)} / {c.device}" for c in matrix.columns]
    head = "| {} | " + " | ".join(titles) + " |"
    rule = "|---|" + "---|" * len(titles)
    who = [
        f"| {title} | {markdown(c.torch)} | {c.date} | {markdown(', '.join(c.areas))} "
        f"| {c.passed} of {c.total} |"
        for title, c in zip(titles, matrix.columns, strict=True)
    ]
    verdicts = [
        f"| {' '.join(filter(None, profile))} | "
        + " | ".join(c.verdicts.get(profile, NOT_RUN).text for c in matrix.columns)
        + " |"
        for profile in profiles(matrix)
    ]
    cells = [
        f"| [{r.id}](spec-{r.area}.md#{r.id.lower()}) {r.level} {r.profile} | "
        + " | ".join(_text(column, r.id) for column in matrix.columns)
        + " |"
        for r in matrix.requirements
    ]
    intro = f"Suite {markdown(matrix.suite)}. Counts are MUST requirements that passed, of all."
    left_out = [f"- {markdown(line)}" for line in matrix.left_out]
    missing = ["Without a column, because nothing of it was run:", "", *left_out, ""]
    return "\n".join(
        [
            *("# Matrix", "", intro, ""),
            "| implementation | torch | run on | has something of | MUST passed |",
            *("|---|---|---|---|---|", *who, ""),
            *(head.format("profile"), rule, *verdicts, ""),
            *(missing if left_out else ()),
            *(head.format("requirement"), rule, *cells, ""),
        ]
    )


def _text(column: Column, id: str) -> str:
    return column.cells[id].text if id in column.cells else SIGNS["not_run"]
