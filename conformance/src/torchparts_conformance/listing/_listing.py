"""Makes an entry from a report, runs an entry again, and renders the page of all entries."""

from __future__ import annotations

import importlib.metadata
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torchparts_conformance._errors import ReportError
from torchparts_conformance.listing import _entry
from torchparts_conformance.listing._entry import Entry
from torchparts_conformance.render import _badge, _render
from torchparts_conformance.render._text import markdown
from torchparts_conformance.report import _report
from torchparts_conformance.subject._adapters import known_adapters
from torchparts_conformance.verify import _rerun, _verify
from torchparts_conformance.verify._rerun import Source
from torchparts_conformance.verify._verify import Expected

_SUITE = "torchparts_conformance"
_HEAD = """# Listed implementations

Implementations whose maintainers [asked to be listed](../be-listed.md). A workflow ran each of them
again, in a fresh environment, with these results.

"""
_TABLE = """| implementation | results | torch | suite | run on | contact |
|---|---|---|---|---|---|
"""


def new(report: Mapping[str, Any], *, adapter: str, contact: str, source: str) -> Entry:
    """Make an entry from a report."""
    who, claims = report["implementation"], report["claims"]
    return Entry(
        name=who["name"],
        version=who["version"],
        adapter=adapter,
        contact=contact,
        source=source,
        date=report["date"],
        suite=report["suite"]["version"],
        torch=report["environment"]["torch"],
        distributions=tuple(f"{d['name']}=={d['version']}" for d in who["distributions"]),
        devices=tuple(claims["devices"]),
        areas=tuple(claims["areas"]),
        profiles=tuple(claims["profiles"] or ()),
        results=_results(report),
    )


def _results(report: Mapping[str, Any]) -> dict[str, str]:
    return {badge.area: badge.message for badge in _badge.badges(report)}


def problems(report: Mapping[str, Any], entry: Entry, expected: Expected) -> list[str]:
    """Return every reason why a report cannot be listed, each with what to do.

    Raises:
        ReportError: the report is of another version of the suite.
    """
    found = _verify.problems(report, None, expected)
    return [*found, *_of_the_run(report), *_of_the_adapter(report, entry), *_of_people(entry)]


def _of_the_run(report: Mapping[str, Any]) -> Iterator[str]:
    if report["problems"]:
        yield f"the run had problems ({report['problems'][0]:.100}). Run it without them"
    if any(row["outcome"] == "not_run" for row in report["rows"]):
        yield "cases were left out. Run whole areas"
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
    if top != _SUITE and not owners & named:
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


def submit(entry: Entry, folder: Path) -> Path:
    """Write an entry.

    Raises:
        ReportError: this version is listed already.
    """
    path = folder / entry.file
    if path.exists():
        raise ReportError(
            f"{path.name} exists, but results are not replaced. Submit another version."
        )
    _render.write(path, _entry.to_toml(entry))
    return path


def recheck(path: Path, *, source: Source, python: str | None = None) -> list[str]:
    """Run an entry again in a fresh environment; return how its results differ.

    Args:
        path: of the entry.
        source: where the environment gets its distributions from.
        python: interpreter of an environment that is ready; without it one is made.
    Raises:
        ReportError: the entry cannot be read, or what it names cannot be installed.
    """
    entry = _entry.read(path)
    split = [text.partition("==") for text in entry.distributions]
    wanted = {
        "implementation": {"distributions": [{"name": n, "version": v} for n, _, v in split]},
        "environment": {"torch": entry.torch},
        "suite": {"name": _report.SUITE, "version": entry.suite},
    }
    claims = {"areas": entry.areas, "devices": entry.devices, "profiles": entry.profiles}
    with tempfile.TemporaryDirectory(prefix="torchparts-recheck-") as home:
        made = python or _rerun.make_environment(wanted, Path(home) / "venv", source)
        again = _rerun.run_in(made, claims, adapter=entry.adapter, out=Path(home) / "out")
    if again is None:
        return ["the second run gave no report"]
    found = _results(again)
    areas = sorted({*entry.results, *found})
    return [
        f"{area}: {entry.results.get(area, 'absent')} -> {found.get(area, 'absent')}"
        for area in areas
        if entry.results.get(area) != found.get(area)
    ]


def page(folder: Path) -> str:
    """Render the page of all entries of a folder.

    Raises:
        ReportError: an entry cannot be read.
    """
    entries = [_entry.read(path) for path in sorted(folder.glob("*.toml"))]
    if not entries:
        return _HEAD + "There are none yet.\n"
    return _HEAD + _TABLE + "".join(map(_row, entries))


def _row(entry: Entry) -> str:
    results = "<br>".join(f"{markdown(a)}: {markdown(text)}" for a, text in entry.results.items())
    contact = markdown(entry.contact)
    if _entry.is_address(entry.contact):
        contact = f"[{contact}]({entry.contact})"
    who = f"[{markdown(entry.name)} {markdown(entry.version)}]({entry.source})"
    cells = (who, results, markdown(entry.torch), markdown(entry.suite), entry.date, contact)
    return f"| {' | '.join(cells)} |\n"
