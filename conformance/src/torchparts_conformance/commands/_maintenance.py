"""The commands that keep the suite's own lists and pages; each gives an exit code."""

from __future__ import annotations

import argparse
import datetime
import subprocess
import tempfile
from pathlib import Path

import torchparts_conformance
from torchparts_conformance import _console
from torchparts_conformance._errors import OptionError, RegistryError
from torchparts_conformance.commands import _reviews, _trends
from torchparts_conformance.commands._runs import pytest_command, requirement_named
from torchparts_conformance.mutation import _kill, _kill_run
from torchparts_conformance.render import _render, _spec_pages
from torchparts_conformance.report import _report
from torchparts_conformance.requirements import _history, _manifest, _traceability
from torchparts_conformance.requirements._cases import CASES, cases_by_id
from torchparts_conformance.requirements._registry import (
    ACCELERATOR,
    AREAS,
    Requirement,
    area_of,
    load_registry,
)
from torchparts_conformance.verify import _online, _publish


def trace(arguments: argparse.Namespace) -> int:
    """Print source test -> requirement -> case; a test that leads nowhere is a broken suite."""
    registry, sources = load_registry(), _traceability.source_tests()
    traces = _traceability.trace(sources, registry, cases_by_id())
    for found in traces:
        ids, cases = ", ".join(found.requirements) or "-", ", ".join(found.cases) or "-"
        _console.say(f"{found.source.key} -> {ids} -> {cases}")
    problems = _traceability.problems(traces, registry)
    if arguments.online:
        problems += _online.problems(sources, registry.values())
    _console.say(f"{len(traces)} source tests, {len(problems)} problems")
    return _console.fail(problems, _console.SUITE_BROKEN)


def spec(arguments: argparse.Namespace) -> int:
    """Write the requirement pages, or check that they are up to date."""
    folder: Path = arguments.folder
    if arguments.check:
        drift = _spec_pages.drift(folder)
        return _console.fail(
            (f"{name} is out of date; write it again" for name in drift), _console.NOT_CONFORMANT
        )
    for name, text in _spec_pages.pages().items():
        _render.write(folder / name, text)
    return 0


def freeze(arguments: argparse.Namespace) -> int:
    """Write the frozen list of cases, or check it."""
    with tempfile.TemporaryDirectory() as folder:
        listed = Path(folder) / "lock.json"
        devices = f"--device=cpu,{ACCELERATOR}"
        options = ["--impl=torch", devices, "--collect-only", f"--freeze={listed}"]
        if subprocess.run([*pytest_command(), *options], check=False).returncode:
            raise RegistryError(
                "freeze: the cases could not be collected, but they must be. See pytest's output."
            )
        made = _manifest.load_manifest(listed)
    known = _manifest.load_manifest()
    if arguments.check:
        same = made is not None and known is not None and _same_list(made, known)
        found = [] if same else ["the cases are not those that were frozen"]
        return _console.fail([*found, *_since()], _console.NOT_CONFORMANT)
    if made is not None:
        if known is not None:
            _refuse_changed_lists(known)
        _history.write(_list_of(made))
        _manifest.freeze(made.rows)
    return _console.fail(_since(), _console.SUITE_BROKEN)


def _list_of(made: _manifest.Manifest) -> _history.FrozenList:
    version = torchparts_conformance.__version__
    return _history.make(version, made.rows, load_registry(), cases=CASES)


def _since() -> list[str]:
    """Say which requirement is not since the version whose list first had it."""
    lists = [_history.read(version) for version in _history.versions()]
    return _history.problems(load_registry(), lists)


def _refuse_changed_lists(known: _manifest.Manifest) -> None:
    """Refuse to freeze where the list of another version is not the one that was frozen.

    Raises:
        RegistryError: such a list was changed or taken away.
    """
    own, now = f"lists/{torchparts_conformance.__version__}.json", _manifest.file_fingerprints()
    for name, sha256 in known.files.items():
        if name.startswith("lists/") and name != own and now.get(name) != sha256:
            raise RegistryError(
                f"freeze: {name} is not the one that was frozen, but the list of another version "
                "is never changed. Restore the file."
            )


def _same_list(made: _manifest.Manifest, known: _manifest.Manifest) -> bool:
    own = torchparts_conformance.__version__
    is_listed = own in _history.versions() and _history.read(own).named() == _list_of(made).named()
    return made.rows == known.rows and made.files == known.files and is_listed


def publish(arguments: argparse.Namespace) -> int:
    """Write reports, badges and matrix into the documentation, or check what is there."""
    if arguments.check == bool(arguments.reports):
        raise OptionError(
            "publish: reports and --check were both or neither given, but it takes one of them. "
            "Name reports to write them, or add --check."
        )
    if arguments.check:
        return _console.fail(_drift(arguments.folder), _console.NOT_CONFORMANT)
    reports = [_report.read(path) for path in arguments.reports]
    _trends.keep_replaced(arguments.folder, reports)
    _publish.publish(reports, arguments.folder)
    _trends.write(arguments.folder)
    today = datetime.date.today()
    _render.write(arguments.folder / _reviews.PAGE, _reviews.page(arguments.folder, today))
    return _console.fail(_drift(arguments.folder), _console.NOT_CONFORMANT)


def _drift(folder: Path) -> list[str]:
    return [*_publish.drift(folder), *_trends.drift(folder), *_reviews.drift(folder)]


def mutants(arguments: argparse.Namespace) -> int:
    """Run the broken implementations, and check that each is caught as it declares."""
    asked = _asked_for(arguments)
    areas = tuple(dict.fromkeys(r.area for r in asked)) or _areas(arguments.area)
    if arguments.jobs < 1:
        raise OptionError(
            f"--jobs {arguments.jobs} asked for, but at least 1 is needed. Give more."
        )
    kills = _kill_run.kill(
        arguments.folder,
        areas,
        requirements=asked,
        base=arguments.impl,
        jobs=arguments.jobs,
        cache=arguments.cache,
    )
    _console.say(
        f"{sum(k.is_exact for k in kills)} of {len(kills)} mutants caught exactly as declared"
    )
    registry = {r.id: r for r in asked or load_registry().values() if r.area in areas}
    page = _kill.to_markdown(kills, registry, _cases_of(areas), torchparts_conformance.__version__)
    problems = _kill.problems(kills, registry)
    if arguments.markdown is not None and not arguments.check:
        _render.write(arguments.markdown, page)
    elif arguments.markdown is not None and arguments.markdown.read_text(encoding="utf-8") != page:
        problems.append(f"{arguments.markdown.name} is out of date; write it again")
    return _console.fail(problems, _console.SUITE_BROKEN)


def _areas(words: str) -> tuple[str, ...]:
    areas = AREAS if words == "all" else tuple(words.split(","))
    if unknown := sorted(set(areas) - set(AREAS)):
        raise OptionError(
            f"--area {unknown[0]!r:.60} is unknown, but these are known: {', '.join(AREAS)}."
        )
    return areas


def _asked_for(arguments: argparse.Namespace) -> list[Requirement]:
    """Give the requirements that alone are to be tried, in order; none where all are.

    Raises:
        OptionError: one is unknown, or another option asks for what they do not decide.
    """
    if arguments.requirement is None:
        return []
    if arguments.area != "all" or arguments.markdown is not None:
        raise OptionError(
            "--requirement was given with --area or --markdown, but a requirement is of one area, "
            "and a page is of whole areas. Leave one of them out."
        )
    registry, words = load_registry(), arguments.requirement.split(",")
    asked = {requirement_named(word, registry, "--requirement").id for word in words}
    return [requirement for id, requirement in registry.items() if id in asked]


def _cases_of(areas: tuple[str, ...]) -> set[str]:
    """Give the frozen cases of some areas."""
    frozen = _manifest.load_manifest()
    cases = {row.case for row in frozen.rows} if frozen else set()
    return {case for case in cases if area_of(case.partition("/")[0]) in areas}
