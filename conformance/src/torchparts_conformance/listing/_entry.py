"""One implementation and version in the list: its report, who answers for it, what became of it.

Rule 1: a label follows from the file alone and a day: withdrawn, else disputed, else what the last
run by others came to, else submitted; and verified is expired when its time is over.
Rule 2: an entry's time ends a year after the run that earned it, or with its torch: on the day a
suite is published that no longer supports this minor version.
Rule 3: nothing is overwritten. Runs and disputes are added, and a withdrawn entry stays.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchparts_conformance import _toml
from torchparts_conformance._errors import ReportError
from torchparts_conformance.report import _report, _untrusted_file

Day = datetime.date
ENTRY, REPORT = "entry.toml", "report.json"
MAX_BYTES = 1 << 16
MAX_TEXT = 300
OLDEST_TORCH = (2, 9)
NOTICE = datetime.timedelta(days=60)
VERIFIED, FAILED, DIFFERENT = "verified", "failed cases", "not reproducible"
RESULTS = (VERIFIED, FAILED, DIFFERENT)
_ADAPTER = re.compile(r"[A-Za-z_][\w.]*(:[A-Za-z_]\w*)?|[a-z][a-z0-9-]*", re.ASCII)
_URL = re.compile(r"https://[a-z0-9.-]+\.[a-z]{2,}(?:/[\w./%#?=&~+@-]*)?", re.ASCII)
_MAIL = re.compile(r"[\w.+-]+@[a-z0-9.-]+\.[a-z]{2,}", re.ASCII)


@dataclass(frozen=True)
class Run:
    """One run by somebody else than who submitted.

    Attributes:
        day: of the run.
        result: one of `RESULTS`.
        by: where it can be looked at, an address.
    """

    day: Day
    result: str
    by: str


@dataclass(frozen=True)
class Objection:
    """A dispute, or a withdrawal: who says what, and how a dispute ended."""

    day: Day
    by: str
    reason: str
    answer: str = ""


@dataclass(frozen=True)
class Entry:
    """What `entry.toml` says beside a report."""

    adapter: str
    contact: str
    source: str
    submitted: Day
    runs: tuple[Run, ...] = ()
    disputes: tuple[Objection, ...] = ()
    withdrawn: Objection | None = None
    report: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def earned(self) -> Day | None:
        """The day of the first of the runs that agree, up to the last; None without one."""
        day = None
        for run in self.runs:
            day = (day or run.day) if run.result == VERIFIED else None
        return day

    @property
    def expires(self) -> Day | None:
        """The first day on which what was verified no longer counts (Rule 2)."""
        return None if self.earned is None else _a_year_after(self.earned)

    def label(self, day: Day) -> str:
        """Say in a word or two what an entry is worth on a day (Rule 1)."""
        if self.withdrawn is not None:
            return "withdrawn"
        if any(not dispute.answer for dispute in self.disputes):
            return "disputed"
        if not self.runs:
            return "submitted"
        last = self.runs[-1].result
        if last == VERIFIED and self.is_over(day):
            return "expired"
        return last

    def is_over(self, day: Day) -> bool:
        """Whether the year is over, or the torch is no longer supported."""
        return self._outlived_torch() or bool(self.expires and day >= self.expires)

    def ending(self, day: Day) -> str:
        """Say when what was verified expires, with a notice before; `-` if nothing was."""
        if self.expires is None:
            return "-"
        if self._outlived_torch() and day < self.expires:
            return f"with torch {torch_name(self.report)}"
        is_near = self.label(day) == VERIFIED and self.expires - day <= NOTICE
        return f"soon: {self.expires}" if is_near else str(self.expires)

    def _outlived_torch(self) -> bool:
        return torch_minor(self.report) < OLDEST_TORCH


def _a_year_after(day: Day) -> Day:
    try:
        return day.replace(year=day.year + 1)
    except ValueError:  # 29 February
        return Day(day.year + 1, 3, 1)


def torch_minor(report: Mapping[str, Any]) -> tuple[int, int]:
    """Give the minor version of the torch of a report; (0, 0) if it does not read like one."""
    found = re.match(r"(\d{1,4})\.(\d{1,4})", str(report["environment"]["torch"]))
    return (int(found[1]), int(found[2])) if found else (0, 0)


def torch_name(report: Mapping[str, Any]) -> str:
    """Write the minor version of the torch of a report, such as `2.13`."""
    return ".".join(map(str, torch_minor(report)))


def read(folder: Path) -> Entry:
    """Read an entry, which may be a stranger's, with its report.

    Raises:
        ReportError: a file is missing or says something that is not allowed.
    """
    report = _report.read(folder / REPORT)
    text = _untrusted_file.read_text(folder / ENTRY, role="entry", max_bytes=MAX_BYTES)
    return parse(text, folder.name, report)


def parse(text: str, name: str, report: Mapping[str, Any]) -> Entry:
    """Check the text of an `entry.toml`.

    Raises:
        ReportError: it is no TOML, a word is unknown or missing, or a value is of another form.
    """
    try:
        data = _toml.parse(text)
        return _entry(_Table("entry", data), report)
    except (ValueError, RecursionError) as error:
        raise ReportError(
            f"entry {name!r:.80}: {error!s:.200}, but each entry has adapter, contact, source and "
            "submitted, and runs, disputes and withdrawn may follow. Correct it."
        ) from error


class _Table:
    """A table of a TOML file of which every word has to be taken."""

    def __init__(self, name: str, data: Any) -> None:
        if not isinstance(data, dict):
            raise ValueError(f"{name} is no table")
        self.name, self._left = name, dict(data)

    def text(self, word: str, is_right: Callable[[str], Any], *, default: str | None = None) -> str:
        """Take a text that fits."""
        value = self._left.pop(word, default)
        if not isinstance(value, str) or len(value) > MAX_TEXT or not is_right(value):
            raise ValueError(f"{self.name}.{word} is {value!r:.60}")
        return value

    def day(self, word: str) -> Day:
        """Take a date without a time."""
        value = self._left.pop(word, None)
        if not isinstance(value, Day) or isinstance(value, datetime.datetime):
            raise ValueError(f"{self.name}.{word} is {value!r:.60}, but a date is needed")
        return value

    def tables(self, word: str) -> Iterable[_Table]:
        """Take a list of tables, which may be absent."""
        value = self._left.pop(word, [])
        if not isinstance(value, list):
            raise ValueError(f"{self.name}.{word} is no list of tables")
        return [_Table(word, each) for each in value]

    def table(self, word: str) -> _Table | None:
        """Take a table, which may be absent."""
        value = self._left.pop(word, None)
        return None if value is None else _Table(word, value)

    def end(self) -> None:
        """Refuse what nobody took."""
        if self._left:
            raise ValueError(f"{self.name} has an unknown word {next(iter(self._left))!r:.60}")


def _entry(table: _Table, report: Mapping[str, Any]) -> Entry:
    withdrawn = table.table("withdrawn")
    made = Entry(
        adapter=table.text("adapter", is_adapter),
        contact=table.text("contact", is_contact),
        source=table.text("source", is_address),
        submitted=table.day("submitted"),
        runs=tuple(_run(each) for each in table.tables("run")),
        disputes=tuple(_objection(each) for each in table.tables("dispute")),
        withdrawn=None if withdrawn is None else _objection(withdrawn),
        report=report,
    )
    table.end()
    return made


def _run(table: _Table) -> Run:
    made = Run(
        table.day("day"), table.text("result", RESULTS.__contains__), table.text("by", is_address)
    )
    table.end()
    return made


def _objection(table: _Table) -> Objection:
    made = Objection(
        table.day("day"),
        table.text("by", is_contact),
        table.text("reason", str.strip),
        table.text("answer", lambda _: True, default=""),
    )
    table.end()
    return made


def is_adapter(text: str) -> bool:
    """Whether a text is a short name or `module:attribute`."""
    return _ADAPTER.fullmatch(text) is not None


def is_address(text: str) -> bool:
    """Whether a text is an https address."""
    return _URL.fullmatch(text) is not None


def is_contact(text: str) -> bool:
    """Whether a text is an https address or a mail address."""
    return is_address(text) or _MAIL.fullmatch(text) is not None


def to_toml(entry: Entry) -> str:
    """Write what `parse` reads; equal entries give equal bytes."""
    lines = [
        *_assigned(adapter=entry.adapter, contact=entry.contact, source=entry.source),
        f"submitted = {entry.submitted.isoformat()}",
    ]
    for run in entry.runs:
        lines += ["", "[[run]]", f"day = {run.day.isoformat()}"]
        lines += _assigned(result=run.result, by=run.by)
    for dispute in entry.disputes:
        lines += ["", "[[dispute]]", *_lines(dispute)]
    if entry.withdrawn is not None:
        lines += ["", "[withdrawn]", *_lines(entry.withdrawn)]
    return "\n".join(lines) + "\n"


def _lines(objection: Objection) -> list[str]:
    given = {"by": objection.by, "reason": objection.reason, "answer": objection.answer}
    filled = {word: text for word, text in given.items() if text}
    return [f"day = {objection.day.isoformat()}", *_assigned(**filled)]


def _assigned(**texts: str) -> list[str]:
    return [f"{word} = {_quoted(text)}" for word, text in texts.items()]


def _quoted(text: str) -> str:
    escaped = "".join(
        f"\\u{ord(sign):04x}" if sign in '"\\\x7f' or ord(sign) < 32 else sign for sign in text
    )
    return f'"{escaped}"'
