"""The commands that run an implementation or look for one; each gives an exit code."""

from __future__ import annotations

import argparse
import difflib
import importlib.metadata
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchparts_conformance import _console
from torchparts_conformance._errors import ConformanceError, OptionError
from torchparts_conformance.judging import _judge
from torchparts_conformance.render import _render, _summary
from torchparts_conformance.report import _known_failures, _outcomes, _report
from torchparts_conformance.requirements._areas import ACCELERATOR, CLAIMED_BY_ALL, PARTS
from torchparts_conformance.requirements._cases import CASES, cases_by_id, find_cases, load_registry
from torchparts_conformance.requirements._needs import needs_of
from torchparts_conformance.requirements._requirement import Requirement
from torchparts_conformance.run import _options
from torchparts_conformance.subject import _adapters
from torchparts_conformance.subject._claims import Claims, refuse_unknown
from torchparts_conformance.subject._missing import unfit_torch
from torchparts_conformance.subject._protocol import Implementation
from torchparts_conformance.verify import _installed, _verify


def run(arguments: argparse.Namespace) -> int:
    """Run the cases in a process of their own: an implementation may end it, but not this one."""
    if arguments.explain:
        return _explain(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        out = arguments.out or Path(scratch)
        out.mkdir(parents=True, exist_ok=True)
        _clear(out)
        ended = _judge.run(_options.arguments(arguments))
        # Once more: the process may have written there as well.
        _clear(out)
        return _verdict(
            out, ended, is_kept=arguments.out is not None, known_failures=arguments.known_failures
        )


def _explain(arguments: argparse.Namespace) -> int:
    """Tell all about one requirement, and run its cases in the open: nothing is judged here."""
    asked = requirement_named(arguments.explain, load_registry(), "--explain")
    arguments.area = asked.area
    cases = [(case.name, case.text) for case in cases_by_id().get(asked.id, [])]
    _console.say(*_summary.explained(asked, cases), "")
    sys.stdout.flush()
    shown = ("--requirement", asked.id, "--tb=long", "-vv", "--no-header", "-rN", "--capture=fd")
    command = [*_open_command(), *shown, *_options.arguments(arguments)]
    return subprocess.run(command, check=False).returncode


def requirement_named(word: str, registry: Mapping[str, Requirement], option: str) -> Requirement:
    """Give the requirement that an option names by its id, in whatever case.

    Raises:
        OptionError: there is none.
    """
    if (id := word.upper()) not in registry:
        near = difflib.get_close_matches(id, registry, n=3) or list(registry)[:3]
        raise OptionError(
            f"{option} {id!r:.60} is unknown, but a requirement is named by its id, such as "
            f"{', '.join(near)}. See the requirement pages."
        )
    return registry[id]


def _clear(folder: Path) -> None:
    """Take away what is there of a run, so that nothing of it is taken for this one's."""
    for name in ("report.json", "junit.xml", "matrix.html", "matrix.md", "badge-*"):
        for path in folder.glob(name):
            path.unlink()


def pytest_command() -> list[str]:
    """Give the command that runs the cases with the suite's own settings, without its options."""
    return [*_open_command(), "-p", "no:terminal", "--progress"]


def _open_command() -> list[str]:
    """Give the command that runs them and shows what pytest shows."""
    return [
        *(sys.executable, "-m", "pytest", str(CASES), f"--rootdir={CASES}"),
        *("-c", str(CASES / "pytest.ini"), "-p", "torchparts_conformance.plugin"),
    ]


def _verdict(
    folder: Path,
    ended: _judge.Ended,
    *,
    is_kept: bool = False,
    known_failures: Path | None = None,
) -> int:
    """Believe what was told in time, not the exit code of the process that ran the cases.

    Everything in the folder is written here, and nothing where there is a doubt.
    """
    if ended.status == _console.BAD_INPUT and ended.complaint:
        return _console.fail([f"torchparts-conformance: {ended.complaint}"], _console.BAD_INPUT)
    if ended.report is None:
        is_broken = ended.status == _console.SUITE_BROKEN
        return _console.fail(
            [_lost(ended)], _console.SUITE_BROKEN if is_broken else _console.NOT_CONFORMANT
        )
    try:
        report = _report.parse(ended.report, "of the run")
    except ConformanceError as error:
        return _console.fail([_tampered([str(error)])], _console.NOT_CONFORMANT)
    if contradictions := [*_judge.contradictions(report, ended), *_refutations(report)]:
        return _console.fail([_tampered(contradictions)], _console.NOT_CONFORMANT)
    _render.write_all(report, folder)
    page = folder / "matrix.html" if is_kept else None
    notes = _known_failures.notes(_known_failures.load(known_failures))
    _console.say(*_summary.summary(report, load_registry(), page, notes))
    return _report.exit_code(report)


def _lost(ended: _judge.Ended) -> str:
    return (
        f"torchparts-conformance: the run ended without a report and {_how(ended)}, but every run "
        "writes one. Run the cases with python -m pytest to see more."
    )


def _how(ended: _judge.Ended) -> str:
    if ended.status < 0:
        return f"by signal {-ended.status}"
    said = f"; its last line was {ended.last_line!r:.200}" if ended.last_line else ""
    return f"with status {ended.status}{said}"


def _tampered(reasons: Sequence[str]) -> str:
    return (
        f"torchparts-conformance: the report is not genuine ({'; '.join(reasons[:3])}), but "
        "success needs one that is. Keep the code under test from changing the suite."
    )


def _refutations(report: Mapping[str, Any]) -> list[str]:
    """Say why a success, of a profile or of all, is not to be believed."""
    if all(verdict["verdict"] != _outcomes.CONFORMANT for verdict in report["verdicts"]):
        return []
    try:
        return _verify.problems(report, None, _installed.expected())
    except ConformanceError as error:
        return [str(error)]


def list_adapters(_: argparse.Namespace) -> int:
    """Print every implementation that has a short name, and whether it is installed."""
    for name, path in sorted(_adapters.known_adapters().items()):
        origin = "shipped" if name in _adapters.SHIPPED else "entry point"
        _console.say(f"{name:<14} {origin:<12} {_adapters.installed(name)}  ({path})")
    return 0


def doctor(arguments: argparse.Namespace) -> int:
    """Import an adapter and its parts, and name what core and robust cases will not find."""
    _see_working_directory()
    implementation = _adapters.load_implementation(arguments.impl)
    refuse_unknown(Claims(implementation, PARTS, ("cpu", ACCELERATOR)), load_registry())
    _console.say(
        f"{implementation.name} {implementation.version}, protocol {implementation.protocol}"
    )
    for name in implementation.distributions:
        _console.say(f"distribution {name}: {_version_of(name)}")
    unfit = unfit_torch(implementation)
    missing = [line for part in PARTS for line in _examine(implementation, part)]
    missing += [unfit] if unfit else []
    _console.say(*(missing or ["nothing is missing"]))
    return _console.NOT_CONFORMANT if missing else 0


def _see_working_directory() -> None:
    """Import from where `run` does: in the working directory, where a script does not look."""
    here = str(Path.cwd())
    if here not in sys.path and not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, here)


def _version_of(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _examine(implementation: Implementation, part: str) -> Iterable[str]:
    if part not in implementation.parts:
        _console.say(f"{part}: not provided")
        return
    registry, found = load_registry(), _adapters.load_part(implementation, part)
    names = {
        name
        for case in find_cases()
        if case.area == part
        and any(registry[id].profile in CLAIMED_BY_ALL for id in case.ids if id in registry)
        for name in needs_of(case.path, case.name.partition("::")[2]).names
    }
    why = {name: reason for name in sorted(names) if (reason := _why_missing(found, name))}
    _console.say(f"{part}: {len(names) - len(why)} of {len(names)} names found")
    yield from (f"{part}: {name} is missing ({reason})" for name, reason in why.items())


def _why_missing(found: Any, name: str) -> str:
    try:
        getattr(found, name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a stranger's attribute may raise anything
        return _adapters.one_line(error)
    return ""
