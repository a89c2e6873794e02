"""Rows of a report, and its output as a table, an HTML page, JSON, CSV and scalars."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from difflib import get_close_matches
from functools import wraps
from os import PathLike
from pathlib import Path as FilePath
from types import TracebackType
from typing import Any, ClassVar, Generic, NoReturn, ParamSpec, TypeVar

from .._attribution import Attribution
from .._errors import OptionError, StateError, UnknownNameError, check_int
from .._record import Path
from .._torch_compat import is_compiled
from .._tracker import check_patterns, matches
from ._flame_page import Amounts, Stack, flame_page
from ._rows import PHASES, stack_of, values_of, with_unit

CALLS = "calls"


R = TypeVar("R")
P = ParamSpec("P")


class _NoReportError(StateError, AttributeError):
    """Raised when an attribute of a report is read from the report's context."""


class ReportContext(AbstractContextManager[R]):
    """The context manager of a report. Reading results from it raises an error with the fix."""

    def __init__(self, function: str, context: AbstractContextManager[R]) -> None:
        self._function, self._context = function, context

    def __enter__(self) -> R:
        return self._context.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        return self._context.__exit__(kind, error, traceback)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        raise _NoReportError(
            f"mod_tracker.{self._function}: use it as `with {self._function}(...) as report:`, and "
            f"read {name} from the report."
        )


def reporting(function: Callable[P, Iterator[R]]) -> Callable[P, AbstractContextManager[R]]:
    """Make a context manager from a generator function; see `ReportContext`."""
    begin = contextmanager(function)

    @wraps(function)
    def report(*args: P.args, **kwargs: P.kwargs) -> AbstractContextManager[R]:
        return ReportContext(function.__name__, begin(*args, **kwargs))

    return report


SHOWN = 3
"""Names that a note shows."""

UNSEEN_BYTES = "bytes that compiled code allocates are missing"

WHOLE = "its time includes that of its children"


def ran_compiled(path: Path) -> bool:
    """Whether calls on this path run compiled code."""
    called = None if path.guard is None else path.guard()
    return called is not None and is_compiled(called)


def compiled_paths(attribution: Attribution) -> list[Path]:
    """Return the paths of modules that ran compiled, in the order of their calls."""
    paths = (path for state in list(attribution.states) for path in state.walk())
    return [path for path in paths if path.name and ran_compiled(path)]


def notes_on_compiled(
    attribution: Attribution, missing: str, functions: Iterable[str] = ()
) -> tuple[str, ...]:
    """Return notes that name compiled modules, and modules that called compiled functions.

    A compiled module is one row, without its children.
    """
    modules = dict.fromkeys(path.name for path in compiled_paths(attribution))
    notes = []
    if modules:
        shown = _shown(modules)
        notes.append(f"compiled, so each is one row without its children: {shown}; {missing}")
    if functions:
        notes.append(f"compiled functions ran in {_shown(functions)}; {missing}")
    return tuple(notes)


def _shown(names: Iterable[str]) -> str:
    found = list(names)
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return f"{', '.join(found[:SHOWN])}{more}"


def nothing_called_note(rows: Mapping[str, object]) -> tuple[str, ...]:
    """Return a note if no module was called."""
    if any(rows):
        return ()
    return ("no module was called in the `with` block: all of it is outside",)


class Report(Generic[R]):
    """Result of a measurement, complete when its `with` block ends. `print` shows it as a table.

    `report["layers.0"]` is the row of a module, by its state_dict prefix or by its full name,
    `"Net.layers.0"`.

    Attributes:
        unit: unit of the numbers.
        title: title of a page.
        columns: columns of a table; `to_json()` and `to_csv()` have all columns.
        sort_by: default column by which rows are sorted, largest first.
        explained: explanation of the columns, printed below a table.
        scalar_unit: suffix of the names of `scalars()`, and the number by which amounts are
            divided.
        notes: limits of this measurement; a table ends with them.
    """

    unit: ClassVar[str] = ""
    title: ClassVar[str] = ""
    columns: ClassVar[tuple[str, ...]] = ("calls", "total", *PHASES, "self_total")
    sort_by: ClassVar[str] = "total"
    explained: ClassVar[str] = (
        "A module counts with the modules inside it; self: without them. recompute: forwards that "
        "a checkpoint runs again."
    )
    scalar_unit: ClassVar[tuple[str, int]] = ("count", 1)

    def __init__(self) -> None:
        self._rows: dict[str, R] | None = None
        self._total = 0
        self._stacks: dict[str, dict[Stack, Amounts]] = {}
        self._ran = True
        self._is_difference = False
        self.notes: tuple[str, ...] = ()

    def _fill(
        self,
        rows: Mapping[str, R],
        total: int,
        stacks: Mapping[str, dict[Stack, Amounts]] | None = None,
        *,
        ran: bool = True,
    ) -> None:
        """Set the result.

        Args:
            rows: by name of the module; the outside has the name "".
            total: sum over all rows.
            stacks: amounts by stack and phase, for each column that the page can show, the default
                column first. None: the report has no page.
            ran: whether any code ran in the block.
        """
        self._rows = dict(rows)
        self._total = total
        self._stacks = dict(stacks or {})
        self._ran = ran

    @property
    def rows(self) -> dict[str, R]:
        """Rows of the modules by name, in the order of their first calls."""
        return {name: row for name, row in self._complete().items() if name}

    @property
    def outside(self) -> R:
        """Row of the code that ran outside of all modules."""
        return self._complete()[""]

    @property
    def total(self) -> int:
        """Sum of all amounts: the self amounts of all modules and of the outside add up to it."""
        self._complete()
        return self._total

    def __getitem__(self, name: str) -> R:
        rows = self.rows
        if name in rows:
            return rows[name]
        by_key: dict[str, list[str]] = {}
        for known in rows:
            by_key.setdefault(known.partition(".")[2], []).append(known)
        found = by_key.get(name, []) if name else []
        if len(found) == 1:
            return rows[found[0]]
        if found:
            raise UnknownNameError(
                f"mod_tracker.report: {name!r} is a module of several models. Ask for one of "
                f"{', '.join(found)}."
            )
        close = get_close_matches(str(name), [*filter(None, by_key), *rows], n=3)
        what = f"Similar names: {', '.join(close)}." if close else "Print the report to see all."
        raise UnknownNameError(f"mod_tracker.report: no module named {name!r} ran. {what}")

    def __iter__(self) -> Iterator[R]:
        return iter(self.rows.values())

    def __len__(self) -> int:
        return len(self.rows)

    def sum(self, column: str, *patterns: str) -> int:
        """Return the sum of a column over all modules and the outside, or over some modules.

        Args:
            column: a number of the rows, such as "self_forward".
            patterns: shell patterns of names or state_dict prefixes, such as "layers.*". Only the
                outermost modules that match count, so nothing counts twice. They may be parts of
                several models, such as the stages of a pipeline.

        Raises:
            OptionError: there is no such column, or a pattern is not a string.
        """
        self._check_column("sum", "column", column)
        rows = self._complete()
        if not patterns:
            return sum(getattr(row, column) for row in rows.values())
        check_patterns("sum", patterns)
        chosen = {name for name in rows if name and matches(name, patterns)}
        return sum(
            getattr(rows[name], column)
            for name in chosen
            if not any(around in chosen for around in stack_of(name)[:-1])
        )

    def top(self, count: int, *, by: str | None = None) -> list[R]:
        """Return the rows with the largest values of a column.

        Raises:
            OptionError: there is no such column, or `count` is negative or not an int.
        """
        check_int("top", "count", count, 0)
        return self._sorted("top", by)[:count]

    def _sorted(self, function: str, by: str | None) -> list[R]:
        column = self.sort_by if by is None else by
        self._check_column(function, "by", column)
        return sorted(self.rows.values(), key=lambda row: -getattr(row, column))

    def _check_column(self, function: str, name: str, column: object) -> None:
        kind = type(self.outside)
        properties = [key for key, value in vars(kind).items() if isinstance(value, property)]
        known = [*values_of(self.outside), *properties]
        if column not in known:
            close = get_close_matches(str(column), known, n=3)
            raise OptionError(
                f"mod_tracker.{function}: {name} must be a column; got {column!r}. "
                f"{'Similar columns' if close else 'Choose one of'}: {', '.join(close or known)}."
            )

    def __str__(self) -> str:
        try:
            return self.table()
        except StateError as error:
            return str(error)

    def table(self, *, by: str | None = None, limit: int | None = None) -> str:
        """Return a text table, largest first, the outside last, with notes below it.

        Args:
            by: column to sort by.
            limit: modules at most; None for all.

        Raises:
            OptionError: there is no such column, or `limit` is negative or not an int.
        """
        check_int("table", "limit", limit, 0, or_none="all modules")
        rows = [row for row in self._sorted("table", by) if self._has_numbers(row)]
        shown = [*rows[:limit], self.outside]
        cells = [["module", *(name.removesuffix("_total") for name in self.columns)]]
        cells += [
            [row.name, *(self._cell(row, name) for name in self.columns)]  # type: ignore[attr-defined]
            for row in shown
        ]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [
            "  ".join(
                cell.rjust(width) if place else cell.ljust(width)
                for place, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in cells
        ]
        ruled = [lines[0], "-" * len(lines[0]), *lines[1:]]
        return "\n".join([*ruled, self.explained, *self._footer(), *self.notes])

    def _cell(self, row: Any, column: str) -> str:
        value = getattr(row, column)
        return f"{value:,}" if column == CALLS else self.show(value)

    def _has_numbers(self, row: Any) -> bool:
        return any(getattr(row, column) for column in self.columns)

    def _footer(self) -> tuple[str, ...]:
        """Return more lines below a table."""
        return ()

    def to_html(self, path: str | PathLike[str] | None = None, *, by: str | None = None) -> str:
        """Return a page with a flame chart and the table as one self-contained file.

        Args:
            path: file to write the page to. The page is returned in any case.
            by: column to draw: "total" or, for memory, a column whose bytes add up.

        Raises:
            OptionError: `by` is none of these columns.
            StateError: the report is a difference, or not complete.
        """
        self._refuse_difference("to_html", "chart")
        column = next(iter(self._stacks)) if by is None else by
        if column not in self._stacks:
            raise OptionError(
                f"mod_tracker.to_html: by must be a column whose amounts add up; got {column!r}. "
                f"Choose one of {', '.join(self._stacks)}."
            )
        named = "" if column == "total" else f" ({column})"
        title = f"{self.title}{named} by module"
        page = flame_page(title, self._stacks[column], self.show, table=self.table())
        if path is not None:
            FilePath(path).write_text(page, "utf-8")
        return page

    def to_dict(self) -> dict[str, Any]:
        """Return all results as built-in Python values."""
        modules = [{"name": name, **values_of(row)} for name, row in self.rows.items()]
        outside = values_of(self.outside)
        return {
            "unit": self.unit,
            "total": self.total,
            "outside": outside,
            "modules": modules,
            "notes": list(self.notes),
        }

    def to_json(self) -> str:
        """Return all results as JSON."""
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
        """Return a flat dict of numbers for loggers, such as `"Net.0/backward_flops": 64.0`.

        It has one number for each of the `columns` of each module, of "outside", and of the sums.
        Each name but that of `calls` ends with the unit: flops, s (seconds) or bytes.

        Args:
            by: column by which the largest modules are chosen.
            limit: modules at most; "modules_left_out" is the number of others. None for all.

        Raises:
            OptionError: there is no such column, or `limit` is negative or not an int.
        """
        check_int("scalars", "limit", limit, 0, or_none="all modules")
        unit, of_them = self.scalar_unit
        rows = self._sorted("scalars", by)
        shown: list[tuple[str, Any]] = [(row.name, row) for row in rows[:limit]]  # type: ignore[attr-defined]
        numbers = {
            f"{name}/{column}_{unit}": getattr(row, column) / of_them
            for name, row in [*shown, ("outside", self.outside)]
            for column in self.columns
            if column != CALLS
        }
        numbers |= {f"{name}/calls": float(row.calls) for name, row in shown}
        numbers |= {f"{name}_{unit}": amount / of_them for name, amount in self._sums().items()}
        if len(rows) > len(shown):
            numbers["modules_left_out"] = float(len(rows) - len(shown))
        return numbers

    def _sums(self) -> dict[str, int]:
        return {"total": self.total}

    def diff(self, other: Report[R]) -> Report[R]:
        """Return this report minus `other`; rows that one report lacks count as zero.

        Every number of the result is a difference. A difference has no chart, timeline or
        utilization: asking for one raises an error.

        Raises:
            OptionError: the reports are of different kinds.
        """
        if type(other) is not type(self):
            raise OptionError(
                f"mod_tracker.diff: both reports must be of the same kind; got "
                f"{type(self).__name__} and {type(other).__name__}."
            )
        mine, theirs = self._complete(), other._complete()
        rows = {name: _difference(mine.get(name), theirs.get(name)) for name in {**mine, **theirs}}
        result = type(self)()
        result._fill(rows, self.total - other.total)
        for name, figure in self._figures().items():
            setattr(result, name, _less(figure, other._figures()[name]))
        result.notes = tuple(dict.fromkeys((*self.notes, *other.notes)))
        result._is_difference = True
        return result

    def _figures(self) -> dict[str, Any]:
        """Return the attributes that are numbers, or dicts of numbers, besides the rows."""
        return {}

    def _refuse_difference(self, function: str, what: str) -> None:
        self._complete()
        if self._is_difference:
            raise StateError(
                f"mod_tracker.{function}: a difference has no {what}, since its amounts may be "
                "negative. Ask the two reports that it was made from."
            )

    def _complete(self) -> dict[str, R]:
        if self._rows is None:
            raise StateError(
                "mod_tracker.report: the report is complete when its `with` block has ended. Read "
                "it after the block."
            )
        if not self._ran:
            raise StateError(
                "mod_tracker.report: nothing ran in the `with` block. Call the model in the block, "
                "in the thread that entered it."
            )
        return self._rows

    def show(self, value: int) -> str:
        """Format a number with its unit, in three digits."""
        return with_unit(value, self.unit)


def _less(mine: Any, theirs: Any) -> Any:
    if isinstance(mine, dict):
        return {key: mine.get(key, 0) - theirs.get(key, 0) for key in {**mine, **theirs}}
    return mine - theirs if isinstance(mine, int) else mine


def _difference(mine: Any, theirs: Any) -> Any:
    some = mine or theirs
    numbers = {
        column: (values_of(mine)[column] if mine else 0)
        - (values_of(theirs)[column] if theirs else 0)
        for column in values_of(some)
    }
    return type(some)(some.name, **numbers)
