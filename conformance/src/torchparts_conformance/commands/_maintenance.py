"""The commands for those who change the suite; each returns an exit code."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import torchparts_conformance
from torchparts_conformance import _console
from torchparts_conformance._errors import OptionError
from torchparts_conformance.commands._runs import requirement_named
from torchparts_conformance.mutation import _run
from torchparts_conformance.render import _render, _spec_pages
from torchparts_conformance.report import _report, _results
from torchparts_conformance.requirements import _traceability
from torchparts_conformance.requirements._areas import AREAS
from torchparts_conformance.requirements._cases import cases_by_id, load_registry
from torchparts_conformance.requirements._requirement import Requirement
from torchparts_conformance.verify import _installed, _verify


def trace(_: argparse.Namespace) -> int:
    """Print source test -> requirement -> case; a test that leads nowhere is a broken suite."""
    registry = load_registry()
    traces = _traceability.trace(_traceability.source_tests(), registry, cases_by_id())
    for found in traces:
        ids, cases = ", ".join(found.requirements) or "-", ", ".join(found.cases) or "-"
        _console.say(f"{found.source.key} -> {ids} -> {cases}")
    problems = _traceability.problems(traces, registry)
    _console.say(f"{len(traces)} source tests, {len(problems)} problems")
    return _console.fail(problems, _console.SUITE_BROKEN)


def spec(arguments: argparse.Namespace) -> int:
    """Write the requirement pages into a folder."""
    for name, text in _spec_pages.pages().items():
        _render.write(arguments.folder / name, text)
    return 0


def publish(arguments: argparse.Namespace) -> int:
    """Put reports into the results file, from which the site is built."""
    reports = [(path, _report.read(path)) for path in arguments.reports]
    expected = _installed.expected()
    found = [f"{path}: {t}" for path, r in reports for t in _verify.problems(r, None, expected)]
    found += [f"{path}: {r['problems'][0]:.200}" for path, r in reports if r["problems"]]
    found += [f"{path}: cases were left out" for path, r in reports if _leaves_out(r)]
    if found:
        return _console.fail(found, _console.NOT_CONFORMANT)
    known = _results.read(arguments.results)
    kept = [result for result in known if result.suite == torchparts_conformance.__version__]
    for old in known:
        if old not in kept:
            _console.say(f"dropped {old.name}, {old.device}: it was run by suite {old.suite}")
    new = [result for _, report in reports for result in _results.results_of(report)]
    _render.write(arguments.results, _results.to_text(_results.merged(kept, new), load_registry()))
    return 0


def _leaves_out(report: Mapping[str, Any]) -> bool:
    return any(row["outcome"] == "not_run" for row in report["rows"])


def mutants(arguments: argparse.Namespace) -> int:
    """Try each broken implementation on the requirements it declares to break."""
    if arguments.jobs < 1:
        raise OptionError(f"--jobs is {arguments.jobs}; it must be at least 1.")
    asked = _asked_for(arguments)
    areas = dict.fromkeys(r.area for r in asked) or _areas(arguments.area)
    tried = _run.try_all(
        arguments.folder,
        areas,
        requirements=[r.id for r in asked],
        base=arguments.impl,
        jobs=arguments.jobs,
    )
    _console.say(f"{sum(t.is_caught for t in tried)} of {len(tried)} broken implementations caught")
    wrong = [f"{t.mutant.name} of {t.mutant.area}: {t}" for t in tried if not t.is_caught]
    broken = {id for t in tried for id in t.asked}
    wrong += [f"{r.id} has no broken implementation" for r in asked if r.id not in broken]
    return _console.fail(wrong, _console.SUITE_BROKEN)


def _areas(words: str) -> tuple[str, ...]:
    areas = AREAS if words == "all" else tuple(words.split(","))
    if unknown := sorted(set(areas) - set(AREAS)):
        raise OptionError(
            f"--area {unknown[0]!r:.60} is unknown, but these are known: {', '.join(AREAS)}."
        )
    return areas


def _asked_for(arguments: argparse.Namespace) -> list[Requirement]:
    """Return the requirements to try; none where all are.

    Raises:
        OptionError: one is unknown, or --area is given too.
    """
    if arguments.requirement is None:
        return []
    if arguments.area != "all":
        raise OptionError("--requirement was given with --area. Give one of them.")
    registry, words = load_registry(), arguments.requirement.split(",")
    asked = {requirement_named(word, registry, "--requirement").id for word in words}
    return [requirement for id, requirement in registry.items() if id in asked]
