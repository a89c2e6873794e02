"""The commands that keep the list of implementations; each gives an exit code."""

from __future__ import annotations

import argparse
import datetime
from pathlib import Path

from torchparts_conformance import _console
from torchparts_conformance._errors import OptionError
from torchparts_conformance.commands._reports import source_of
from torchparts_conformance.listing import _entry, _page, _recheck, _submit
from torchparts_conformance.report import _report
from torchparts_conformance.verify import _installed


def submit(arguments: argparse.Namespace) -> int:
    """Make an entry of the list from a report, if it holds what a reviewer looks at."""
    report = _report.read(arguments.report)
    entry = _submit.new(
        adapter=arguments.impl,
        contact=arguments.contact,
        source=arguments.source,
        day=arguments.day,
        report=report,
    )
    found = _submit.problems(report, entry, _installed.expected())
    if not found:
        folder = _submit.submit(report, entry, arguments.to)
        _console.say(
            f"{folder} is ready. Open a pull request that adds it; there, it is run again."
        )
    return _console.fail(found, _console.NOT_CONFORMANT)


def recheck(arguments: argparse.Namespace) -> int:
    """Run an entry of the list again, and add what came of it."""
    if not _entry.is_address(arguments.by):
        raise OptionError(
            f"--by {arguments.by!r:.80} is no https address, but a run has to be looked at. "
            "Give that of its log."
        )
    found = _recheck.recheck(
        arguments.entry,
        day=arguments.day,
        by=arguments.by,
        source=source_of(arguments),
        python=arguments.python,
    )
    label = _entry.read(arguments.entry).label(arguments.day)
    _console.say(f"{arguments.entry.parent.name}/{arguments.entry.name}: {label}")
    return _console.fail(found, _console.NOT_CONFORMANT)


def registry(arguments: argparse.Namespace) -> int:
    """Write the page and the badges of the list, or check that they follow from its entries."""
    folder: Path = arguments.folder
    if not folder.is_dir():
        raise OptionError(f"{str(folder)!r:.80} is no folder, but the list is one. Name it.")
    found = _page.problems(_page.entries(folder), _installed.expected())
    if arguments.check:
        return _console.fail([*found, *_page.drift(folder)], _console.NOT_CONFORMANT)
    if not found:
        _page.write(folder, arguments.day)
    return _console.fail(found, _console.NOT_CONFORMANT)


def day(text: str) -> datetime.date:
    """Read a day.

    Raises:
        ArgumentTypeError: it is none.
    """
    try:
        return datetime.date.fromisoformat(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r:.40} is no day. Write it as 2026-12-31"
        ) from error
