"""Rows of a report, and the ways to write them down."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Generic, TypeVar

from .._errors import MissingExtraError, OptionError, StateError
from .._numbers import bytes_shown, time_shown, with_unit
from ._phase_totals import PHASES, PhaseTotals
from ._table import cells, text
from .charts import Amounts, Chart, MemoryLine, Stack, frames_of, page, png

OUTSIDE_NAME = "(outside)"


@dataclass(frozen=True)
class PhaseRow:
    """Amounts of one module by phase, in the `unit` of the report.

    Args:
        name: of the module, as in `ModuleCall`.
        self_forward: without the modules inside it; so `self_recompute` and `self_backward`.
        forward: with the modules inside it.
        recompute: of forwards that ran again for backward; `backward`: of backward.
    """

    name: str
    self_forward: int = 0
    self_recompute: int = 0
    self_backward: int = 0
    forward: int = 0
    recompute: int = 0
    backward: int = 0

    @property
    def self_total(self) -> int:
        """Amount of the module itself in all phases."""
        return self.self_forward + self.self_recompute + self.self_backward

    @property
    def total(self) -> int:
        """Amount of the module and those inside it in all phases."""
        return self.forward + self.recompute + self.backward


R = TypeVar("R")


def values_of(row: Any) -> dict[str, int]:
    """Return a row's numbers by column name."""
    return {item.name: getattr(row, item.name) for item in fields(row) if item.name != "name"}


def phase_rows(totals: PhaseTotals) -> dict[str, PhaseRow]:
    """Turn a totals into rows by name; the outside has the name ""."""
    own, everything = totals.by_module(inside=False), totals.by_module()
    return {
        name: PhaseRow(
            name or OUTSIDE_NAME,
            **{f"self_{phase}": own[name][phase] for phase in PHASES},
            **everything[name],
        )
        for name in everything
    }


class Report(Generic[R]):
    """Result of a measurement; complete when its `with` block ends.

    Attributes:
        unit: what the numbers count.
        title: what they are, above a chart.
        columns: columns of `table(containers=True)`; `to_json()` and `to_csv()` have all there are.
        sort_by: column that `top()` and that table are sorted by, largest first.
        own_columns: columns of `table()`, which sorts by the first that is of the module itself.
        explained: what the columns are; it ends a table.
        scalar_unit: end of the names of `scalars()`, and how many of `unit` make one of it.
        notes: what a reader has to know about how this was measured; `table()` ends with them.
    """

    unit: ClassVar[str] = ""
    title: ClassVar[str] = ""
    columns: ClassVar[tuple[str, ...]] = (
        "self_total",
        "forward",
        "recompute",
        "backward",
        "total",
    )
    sort_by: ClassVar[str] = "total"
    own_columns: ClassVar[tuple[str, ...]] = (
        "self_total",
        *(f"self_{phase}" for phase in PHASES),
    )
    explained: ClassVar[Mapping[str, str]] = {
        "forward": "in the forward pass",
        "recompute": "when a checkpoint runs it again",
        "backward": "in the backward pass",
        "total": "in all three",
    }
    scalar_unit: ClassVar[tuple[str, int]] = ("count", 1)

    def __init__(self) -> None:
        self._rows: dict[str, R] | None = None
        self._total = 0
        self._stacks: dict[str, dict[Stack, Amounts]] = {}
        self.notes: tuple[str, ...] = ()

    def fill(
        self,
        rows: Mapping[str, R],
        total: int,
        stacks: Mapping[str, dict[Stack, Amounts]] | None = None,
    ) -> None:
        """Set the result.

        Args:
            rows: by name of the module; the one with the name "" is the outside.
            total: everything that was counted.
            stacks: for each column that a chart can show, first the one it shows unless told
                otherwise, amounts by stack and phase. None: there are no charts.
        """
        self._rows = dict(rows)
        self._total = total
        self._stacks = dict(stacks or {})

    @property
    def rows(self) -> dict[str, R]:
        """Rows of the modules by name, in the order in which they were first seen."""
        return {name: row for name, row in self._complete().items() if name}

    @property
    def outside(self) -> R:
        """Row of what ran outside of all modules."""
        return self._complete()[""]

    @property
    def total(self) -> int:
        """Everything that was counted; the self amounts of modules and outside add up to it."""
        self._complete()
        return self._total

    def __getitem__(self, name: str) -> R:
        return self.rows[name]

    def __iter__(self) -> Iterator[R]:
        return iter(self.rows.values())

    def __len__(self) -> int:
        return len(self.rows)

    def sum(self, column: str) -> int:
        """Return the sum of a column over all modules and the outside."""
        return sum(getattr(row, column) for row in self._complete().values())

    def top(self, count: int, *, by: str | None = None) -> list[R]:
        """Return the rows with the largest values of a column.

        Raises:
            OptionError: there is no such column.
        """
        column = by or self.sort_by
        rows = list(self.rows.values())
        if rows and not hasattr(rows[0], column):
            raise OptionError(
                f"mod_tracker.top: column {column!r} is unknown, but it must be one of the rows' "
                f"attributes. Choose one of {', '.join(self.columns)}."
            )
        return sorted(rows, key=lambda row: -getattr(row, column))[:count]

    def table(
        self, *, by: str | None = None, limit: int | None = None, containers: bool = False
    ) -> str:
        """Return a text table, largest first, the outside last, and what its columns are.

        Args:
            by: column to sort by.
            limit: modules at most; None for all.
            containers: count the work inside a module for it, too. By default a row is what the
                module does itself, and modules that do nothing themselves have no row.

        Raises:
            OptionError: there is no such column.
        """
        return "\n".join([*text(self, by=by, limit=limit, containers=containers), *self.notes])

    def to_html(self, *, by: str | None = None) -> str:
        """Return a page with a flame chart: one self-contained file.

        Args:
            by: what is drawn: "total", or for memory one of the kinds of bytes that add up.

        Raises:
            OptionError: `by` is none of these.
            StateError: the report is a difference, or not complete.
        """
        return page(self._chart(by))

    def to_png(self, *, by: str | None = None) -> bytes:
        """Return the same chart as a picture; needs matplotlib.

        Args:
            by: as for `to_html`.

        Raises:
            MissingExtraError: matplotlib is not installed.
            OptionError: `by` cannot be drawn.
            StateError: the report is a difference, or not complete.
        """
        return png(self._chart(by))

    def _chart(self, by: str | None) -> Chart:
        self._complete()
        if not self._stacks:
            raise StateError(
                "mod_tracker.to_html: the report is a difference, but a chart's widths must add "
                "up. Draw the two reports that it was made from."
            )
        column = by or next(iter(self._stacks))
        if column not in self._stacks:
            raise OptionError(
                f"mod_tracker.to_html: {column!r} cannot be drawn, but by must be a column whose "
                f"amounts add up. Choose one of {', '.join(self._stacks)}."
            )
        named = "" if column == "total" else f" ({column})"
        return Chart(
            title=f"{self.title}{named} by module",
            frames=tuple(frames_of(self._stacks[column])),
            show=self.show,
            show_time=time_shown,
            show_bytes=bytes_shown,
            line=self._memory_line(),
            notes=self.notes,
        )

    def _memory_line(self) -> MemoryLine | None:
        """Memory over time, where the report has it."""
        return None

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values."""
        modules = [{"name": name, **values_of(row)} for name, row in self.rows.items()]
        outside = values_of(self.outside)
        return {"unit": self.unit, "total": self.total, "outside": outside, "modules": modules}

    def to_json(self) -> str:
        """Return everything as JSON."""
        return json.dumps(self.to_dict(), indent=1)

    def to_csv(self) -> str:
        """Return one line per module and one for the outside, with a header."""
        rows = [{"name": row.name, **values_of(row)} for row in self._complete().values()]  # type: ignore[attr-defined]
        text = io.StringIO()
        writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue()

    def scalars(self, *, by: str | None = None, limit: int | None = 20) -> dict[str, float]:
        """Return numbers by name, flat, as loggers take them: `"Net.0/backward_flops": 64.0`.

        Every module has the `columns`; so has "outside", and the sums have no module. The unit is
        the end of each name: flops, s (seconds) or bytes.

        Args:
            by: column that decides which modules are the largest.
            limit: modules at most; how many others there are is "modules_left_out", if any. None
                for all.

        Raises:
            OptionError: there is no such column, or `limit` is negative or not an int.
        """
        if limit is not None and (type(limit) is not int or limit < 0):
            raise OptionError(
                f"mod_tracker.scalars: limit {limit!r} is not a number of modules, but it must be "
                "an int of at least 0, or None. Leave it out for 20."
            )
        unit, of_them = self.scalar_unit
        rows = self.top(len(self.rows), by=by)
        shown: list[tuple[str, Any]] = [(row.name, row) for row in rows[:limit]]  # type: ignore[attr-defined]
        numbers = {
            f"{name}/{column}_{unit}": getattr(row, column) / of_them
            for name, row in [*shown, ("outside", self.outside)]
            for column in self.columns
        }
        numbers |= {f"{name}_{unit}": amount / of_them for name, amount in self._sums().items()}
        if len(rows) > len(shown):
            numbers["modules_left_out"] = float(len(rows) - len(shown))
        return numbers

    def _sums(self) -> dict[str, int]:
        return {"total": self.total}

    def diff(self, other: Report[R]) -> Report[R]:
        """Return this report less `other`; a module that one of them lacks counts as zero there.

        Raises:
            OptionError: the reports are of different kinds.
        """
        if type(other) is not type(self):
            raise OptionError(
                f"mod_tracker.diff: the other report is a {type(other).__name__}, but it must be "
                f"a {type(self).__name__}. Compare reports of the same kind."
            )
        mine, theirs = self._complete(), other._complete()
        rows = {name: _difference(mine.get(name), theirs.get(name)) for name in {**mine, **theirs}}
        result = type(self)()
        result.fill(rows, self.total - other.total)
        return result

    def __rich__(self) -> Any:
        try:
            from rich.table import Table
        except ImportError as error:
            raise MissingExtraError(
                "mod_tracker.rich: the package rich is not installed, but this output needs it. "
                "Install mod-tracker[rich], or use table()."
            ) from error
        header, *rows = cells(self, by=None, limit=None, containers=False)
        table = Table(*header)
        for row in rows:
            table.add_row(*row)
        return table

    def _complete(self) -> dict[str, R]:
        if self._rows is None:
            raise StateError(
                "mod_tracker.report: the report is empty, but it is read. Read it after the "
                "`with` block that measures."
            )
        return self._rows

    def show(self, value: int) -> str:
        """Return a number with its unit, in three digits."""
        return with_unit(value, self.unit)


def _difference(mine: Any, theirs: Any) -> Any:
    some = mine or theirs
    numbers = {
        column: (values_of(mine)[column] if mine else 0)
        - (values_of(theirs)[column] if theirs else 0)
        for column in values_of(some)
    }
    return type(some)(some.name, **numbers)
