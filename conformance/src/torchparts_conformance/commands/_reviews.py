"""The command that writes what a yearly review looks at; it gives an exit code."""

from __future__ import annotations

import argparse
import datetime
import re
from pathlib import Path

from torchparts_conformance import _console, _toml
from torchparts_conformance._errors import OptionError, RegistryError
from torchparts_conformance.render import _render, _review
from torchparts_conformance.report import _report
from torchparts_conformance.requirements import _history
from torchparts_conformance.requirements._registry import load_registry
from torchparts_conformance.verify import _publish

PAGE, RELEASED = "review.md", "released.toml"
_DAY = re.compile(r"## As of (\d{4}-\d\d-\d\d)")


def review(arguments: argparse.Namespace) -> int:
    """Write what a yearly review looks at, or check that the page follows from the reports."""
    folder: Path = arguments.folder
    if not _publish.published_reports(folder):
        raise OptionError(
            f"{str(folder)!r:.80} holds no published reports, but a review is about them. Name the "
            "folder of the suite's pages."
        )
    lists = [_history.read(version) for version in _history.versions()]
    found = _review.problems(load_registry(), lists)
    if arguments.check:
        return _console.fail([*found, *drift(folder)], _console.NOT_CONFORMANT)
    _render.write(folder / PAGE, page(folder, arguments.day))
    return _console.fail(found, _console.NOT_CONFORMANT)


def page(folder: Path, day: datetime.date) -> str:
    """Give the page as it is on a day.

    Raises:
        RegistryError: the days of the versions cannot be read.
    """
    reports = [_report.read(path) for path in _publish.published_reports(folder)]
    found = _review.evidence(load_registry().values(), reports)
    return _review.to_markdown(found, released(folder), day)


def released(folder: Path) -> dict[str, datetime.date]:
    """Give the day on which each version of the suite was published; no file says of none.

    Raises:
        RegistryError: the file says something else than days.
    """
    path = folder / RELEASED
    if not path.exists():
        return {}
    try:
        days = _toml.parse(path.read_text(encoding="utf-8"))
        if not all(type(day) is datetime.date for day in days.values()):
            raise ValueError("a value is no day")
    except ValueError as error:
        raise RegistryError(
            f'{RELEASED}: {error}, but a line reads "0.1.0" = 2026-12-01. Correct it.'
        ) from error
    return days


def drift(folder: Path) -> list[str]:
    """Say whether the page is what the reports give on the page's own day."""
    day = _DAY.search(_render.stored(folder / PAGE))
    if day is None:
        return [f"{PAGE} has no day; write it again"]
    wanted = {PAGE: page(folder, datetime.date.fromisoformat(day[1]))}
    return [f"{name} is out of date; write it again" for name in _render.stale(folder, wanted)]
