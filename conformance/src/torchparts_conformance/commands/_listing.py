"""The commands of the list of implementations; each returns an exit code."""

from __future__ import annotations

import argparse

from torchparts_conformance import _console
from torchparts_conformance.commands._reports import source_of
from torchparts_conformance.listing import _listing
from torchparts_conformance.report import _report
from torchparts_conformance.verify import _installed


def submit(arguments: argparse.Namespace) -> int:
    """Make an entry of the list from a report, if nothing speaks against it."""
    report = _report.read(arguments.report)
    entry = _listing.new(
        report, adapter=arguments.impl, contact=arguments.contact, source=arguments.source
    )
    found = _listing.problems(report, entry, _installed.expected())
    if not found:
        path = _listing.submit(entry, arguments.to)
        _console.say(f"{path} is ready. Open a pull request that adds it; there, it is run again.")
    return _console.fail(found, _console.NOT_CONFORMANT)


def recheck(arguments: argparse.Namespace) -> int:
    """Run an entry of the list again, and compare the results."""
    found = _listing.recheck(arguments.entry, source=source_of(arguments), python=arguments.python)
    if not found:
        _console.say(f"{arguments.entry.name}: the second run agrees")
    return _console.fail(found, _console.NOT_CONFORMANT)
