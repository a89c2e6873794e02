"""Makes an entry of a report, once all holds that a reviewer would look at."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torchparts_conformance._errors import ReportError
from torchparts_conformance.listing import _entry
from torchparts_conformance.listing._entry import Day, Entry
from torchparts_conformance.render import _render
from torchparts_conformance.report import _report
from torchparts_conformance.subject._adapters import known_adapters
from torchparts_conformance.verify import _verify
from torchparts_conformance.verify._verify import Expected

_SLUG = re.compile(r"[^a-z0-9.]+")
_BROUGHT_ALONG = "torchparts_conformance"


def problems(report: Mapping[str, Any], entry: Entry, expected: Expected) -> list[str]:
    """Give every reason why a report cannot be listed, each with what to do.

    Args:
        report: as read from its file.
        entry: what is said beside it.
        expected: what the installed suite knows.
    Raises:
        ReportError: the report is of another version of the suite.
    """
    found = _verify.problems(report, None, expected)
    return [*found, *_of_the_run(report), *_of_the_adapter(report, entry), *_of_people(entry)]


def _of_the_run(report: Mapping[str, Any]) -> Iterator[str]:
    if report["problems"]:
        yield f"the run had problems ({report['problems'][0]:.100}). Run it without them"
    if "list" in report["suite"]:
        yield "an earlier list judged. Run it without --suite-version"
    if any(row["outcome"] == "not_run" for row in report["rows"]):
        yield "cases were left out. Run whole areas"
    if _entry.torch_minor(report) < _entry.OLDEST_TORCH:
        yield f"torch {report['environment']['torch']:.40} is too old for an entry. Use a later one"
    distributions = report["implementation"]["distributions"]
    if not distributions:
        yield "the adapter names no distribution, so nobody can install it. Name yours in it"
    for found in distributions:
        if found["kind"] != "record" or found["version"] is None:
            yield (
                f"{found['name']:.80} was run from its source, but a rerun installs a version. "
                "Install its wheel and run again"
            )


def _of_the_adapter(report: Mapping[str, Any], entry: Entry) -> Iterator[str]:
    if not _entry.is_adapter(entry.adapter):
        yield f"--impl {entry.adapter!r:.80} is neither a short name nor module:attribute. Give one"
        return
    if entry.adapter != report["implementation"]["adapter"]:
        ran = report["implementation"]["adapter"]
        yield f"the report is of adapter {ran:.80}, not {entry.adapter:.80}. Name that one"
        return
    module = known_adapters().get(entry.adapter, entry.adapter).partition(":")[0]
    top = module.partition(".")[0]
    named = {_normal(found["name"]) for found in report["implementation"]["distributions"]}
    owners = {_normal(name) for name in importlib.metadata.packages_distributions().get(top, ())}
    if top != _BROUGHT_ALONG and not owners & named:
        yield (
            f"the adapter's module {top:.80} is in none of the distributions that the report "
            "names, but a rerun installs only those. Ship it in one, and name that in the adapter"
        )


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _of_people(entry: Entry) -> Iterator[str]:
    if not _entry.is_contact(entry.contact):
        yield f"--contact {entry.contact!r:.80} is no https or mail address. Give one that is read"
    if not _entry.is_address(entry.source):
        yield f"--source {entry.source!r:.80} is no https address. Give that of the repository"


def folder_of(report: Mapping[str, Any], root: Path) -> Path:
    """Give the folder of an entry: the implementation's name and version as plain words.

    Raises:
        ReportError: nothing is left of a name.
    """
    words = [_SLUG.sub("-", report["implementation"][part].lower()) for part in ("name", "version")]
    name, version = (word.strip("-.") for word in words)
    if not name or not version:
        raise ReportError(
            f"report is of {report['implementation']['name']!r:.80}, but a folder needs letters or "
            "digits of its name and version. Name the implementation otherwise in its adapter."
        )
    return root / name / version


def submit(report: Mapping[str, Any], entry: Entry, root: Path) -> Path:
    """Write an entry that was found right.

    Raises:
        ReportError: there is one already for this version.
    """
    folder = folder_of(report, root)
    if folder.exists():
        raise ReportError(
            f"{folder.parent.name}/{folder.name} is in the list, but results are not replaced. "
            "Submit another version, or withdraw this one."
        )
    _render.write(folder / _entry.REPORT, _report.to_text(report))
    _render.write(folder / _entry.ENTRY, _entry.to_toml(entry))
    return folder


def new(*, adapter: str, contact: str, source: str, day: Day, report: Mapping[str, Any]) -> Entry:
    """Make an entry that nobody has looked at."""
    return Entry(adapter, contact, source, day, report=report)
