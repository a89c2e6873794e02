"""A report's rows as a table: each module by itself, or with the modules inside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol


class Tabular(Protocol):
    """What a table asks of a report."""

    columns: ClassVar[tuple[str, ...]]
    own_columns: ClassVar[tuple[str, ...]]
    explained: ClassVar[Mapping[str, str]]

    @property
    def outside(self) -> Any:
        """Row of what ran outside of all modules."""

    def top(self, count: int, *, by: str | None = None) -> list[Any]:
        """Rows with the largest values of a column."""

    def __len__(self) -> int: ...

    def show(self, value: int) -> str:
        """A number with its unit."""


def cells(
    report: Tabular, *, by: str | None, limit: int | None, containers: bool
) -> list[list[str]]:
    """Return the header, rows of modules from the largest on, and the outside."""
    columns = report.columns if containers else report.own_columns
    rows = report.top(len(report), by=by if containers else _own(by, columns))
    if not containers:
        rows = [row for row in rows if any(getattr(row, name) for name in columns if _is_own(name))]
    header = [
        "module",
        *(column.removeprefix("self_") if not containers else column for column in columns),
    ]
    return [[name.replace("_", " ") for name in header]] + [
        [row.name, *(report.show(getattr(row, column)) for column in columns)]
        for row in [*rows[:limit], report.outside]
    ]


def text(report: Tabular, *, by: str | None, limit: int | None, containers: bool) -> list[str]:
    """Return the lines of the table, and what its columns are."""
    written = cells(report, by=by, limit=limit, containers=containers)
    widths = [max(map(len, column)) for column in zip(*written, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in written
    ]
    return [lines[0], "-" * len(lines[0]), *lines[1:], *said(report, containers=containers)]


def said(report: Tabular, *, containers: bool) -> tuple[str, str]:
    """Return what the columns of a table are."""
    columns = report.columns if containers else report.own_columns
    known = {column.removeprefix("self_"): None for column in columns}
    words = [f"{name}: {words}" for name, words in report.explained.items() if name in known]
    whose = (
        "A module counts with the modules inside it; self: without them."
        if containers
        else "A module counts by itself; modules inside it have rows of their own."
    )
    return whose, "; ".join(words) + "."


def _is_own(column: str) -> bool:
    return column.startswith("self_")


def _own(by: str | None, columns: Any) -> str:
    """The column to sort by: that of the module itself where there is one."""
    if by is None:
        return next(filter(_is_own, columns))
    own = f"self_{by}"
    return own if own in columns else by
