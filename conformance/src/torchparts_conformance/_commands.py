"""Edge: what each command does; every one takes parsed arguments and gives an exit code."""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torchparts_conformance
from torchparts_conformance import (
    _adapters,
    _badge,
    _diff,
    _exit,
    _kill,
    _kill_run,
    _manifest,
    _predicate,
    _render,
    _report,
    _rerun,
    _spec_pages,
    _trace,
    _verify,
)
from torchparts_conformance._cases import CASES, cases_by_id, find_cases
from torchparts_conformance._errors import OptionError, RegistryError, ReportError
from torchparts_conformance._registry import AREAS, CLAIMED_BY_ALL, PARTS, area_of, load_registry

MAX_BADGE_BYTES = 1 << 16
_PASSED_ON = ("impl", "area", "device", "profile", "known_failures", "order", "case_limit")


def run(arguments: argparse.Namespace) -> int:
    """Run the cases in a process of their own, so that no implementation can end the judge."""
    with tempfile.TemporaryDirectory() as scratch:
        out = arguments.out or Path(scratch)
        (out / "report.json").unlink(missing_ok=True)
        options = [
            f"--{word.replace('_', '-')}={value}"
            for word in _PASSED_ON
            if (value := getattr(arguments, word)) is not None
        ]
        ended = subprocess.run([*pytest_command(), *options, f"--out={out}"], check=False)
        return _verdict(out / "report.json", ended.returncode)


def pytest_command() -> list[str]:
    """Give the command that runs the cases with the suite's own settings, without its options."""
    return [
        *(sys.executable, "-m", "pytest", str(CASES), f"--rootdir={CASES}"),
        *("-c", str(CASES / "pytest.ini"), "-p", "torchparts_conformance.plugin"),
        *("-p", "no:terminal", "--progress"),
    ]


def _verdict(path: Path, status: int) -> int:
    """Believe the report, not the exit code of the process that ran a stranger's code."""
    if status == _exit.BAD_INPUT:
        return _exit.BAD_INPUT
    if not path.exists():
        print("torchparts-conformance: the run ended without a report", file=sys.stderr)
        return _exit.SUITE_BROKEN if status == _exit.SUITE_BROKEN else _exit.NOT_CONFORMANT
    report = _report.read(path)
    print(_report.summary(report))
    return _report.exit_code(report)


def list_adapters(_: argparse.Namespace) -> int:
    """Print every implementation that has a short name."""
    for name, path in sorted(_adapters.known_adapters().items()):
        origin = "shipped" if name in _adapters.SHIPPED else "installed"
        print(f"{name:<16} {origin:<10} {path}")
    return 0


def doctor(arguments: argparse.Namespace) -> int:
    """Import an adapter and its parts, and name what core and robust cases will not find."""
    implementation = _adapters.load_implementation(arguments.impl)
    print(f"{implementation.name} {implementation.version}, protocol {implementation.protocol}")
    for name in implementation.distributions:
        print(f"distribution {name}: {_installed(name)}")
    missing = [line for part in PARTS for line in _examine(implementation, part)]
    print("\n".join(missing) or "nothing is missing")
    return _exit.NOT_CONFORMANT if missing else 0


def _installed(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _examine(implementation: torchparts_conformance.Implementation, part: str) -> Iterable[str]:
    if part not in implementation.parts:
        print(f"{part}: not provided")
        return
    registry, found = load_registry(), _adapters.load_part(implementation, part)
    names = {
        name
        for case in find_cases()
        if case.area == part
        and any(registry[id].profile in CLAIMED_BY_ALL for id in case.ids if id in registry)
        for name in case.uses
    }
    missing = sorted(name for name in names if not hasattr(found, name))
    print(f"{part}: {len(names) - len(missing)} of {len(names)} names found")
    yield from (f"{part}: {name} is missing" for name in missing)


def trace(_: argparse.Namespace) -> int:
    """Print source test -> requirement -> case; a test that leads nowhere is a broken suite."""
    registry = load_registry()
    traces = _trace.trace(_trace.source_tests(), registry, cases_by_id())
    for found in traces:
        ids, cases = ", ".join(found.requirements) or "-", ", ".join(found.cases) or "-"
        print(f"{found.source.key} -> {ids} -> {cases}")
    problems = _trace.problems(traces, registry)
    print(f"{len(traces)} source tests, {len(problems)} problems")
    return _tell(problems, _exit.SUITE_BROKEN)


def _tell(problems: Iterable[str], code: int) -> int:
    """Print problems, and give a code if there are any."""
    lines = list(problems)
    for line in lines:
        print(line, file=sys.stderr)
    return code if lines else 0


def spec(arguments: argparse.Namespace) -> int:
    """Write the requirement pages, or check that they are up to date."""
    folder: Path = arguments.folder
    if arguments.check:
        drift = _spec_pages.drift(folder)
        return _tell(
            (f"{name} is out of date; write it again" for name in drift), _exit.NOT_CONFORMANT
        )
    for name, text in _spec_pages.pages().items():
        _render.write(folder / name, text)
    return 0


def freeze(arguments: argparse.Namespace) -> int:
    """Write the frozen list of cases, or check it."""
    with tempfile.TemporaryDirectory() as folder:
        listed = Path(folder) / "lock.json"
        options = ["--impl=torch", "--device=cpu,cuda", "--collect-only", f"--freeze={listed}"]
        if subprocess.run([*pytest_command(), *options], check=False).returncode:
            raise RegistryError("the cases could not be collected; pytest says why above.")
        made = _manifest.load_manifest(listed)
    known = _manifest.load_manifest()
    if arguments.check:
        same = made is not None and known is not None and _same_list(made, known)
        return _tell(
            [] if same else ["the cases are not those that were frozen"], _exit.NOT_CONFORMANT
        )
    if made is not None:
        _manifest.freeze(made.rows)
    return 0


def _same_list(made: _manifest.Manifest, known: _manifest.Manifest) -> bool:
    return made.rows == known.rows and made.files == known.files


def matrix(arguments: argparse.Namespace) -> int:
    """Lay several reports side by side."""
    reports = [_report.read(path) for path in arguments.reports]
    _render.write_matrix(reports, arguments.html, arguments.markdown)
    return 0


def badge(arguments: argparse.Namespace) -> int:
    """Write the badges of a report."""
    for drawn in _badge.badges(_report.read(arguments.report)):
        _render.write(arguments.out / f"badge-{drawn.area}.json", _badge.to_shields(drawn))
        _render.write(arguments.out / f"badge-{drawn.area}.svg", _badge.to_svg(drawn))
    return 0


def predicate(arguments: argparse.Namespace) -> int:
    """Write what an in-toto test-result attestation says about a report."""
    content = _predicate.predicate(_report.read(arguments.report))
    _render.write(arguments.out, json.dumps(content, indent=1) + "\n")
    return 0


def diff(arguments: argparse.Namespace) -> int:
    """Print what changed between two reports; a MUST that regressed is a failure."""
    changes = _diff.compare(_report.read(arguments.old), _report.read(arguments.new))
    print("\n".join(map(str, changes)) or "no outcome changed")
    return _exit.NOT_CONFORMANT if any(change.blocks for change in changes) else 0


def verify(arguments: argparse.Namespace) -> int:
    """Check a report and a badge, and on request run the suite again."""
    report = _report.read(arguments.report)
    expected = _verify.Expected(
        version=torchparts_conformance.__version__,
        manifest=_manifest.load_manifest(),
        registry=load_registry(),
        distribution=arguments.distribution,
        wheel_sha256=_sha256(arguments.wheel),
    )
    problems = _verify.problems(report, _text_of(arguments.badge), expected)
    if arguments.rerun and not problems:
        if arguments.impl is None:
            raise ReportError("--rerun needs --impl: a report does not choose which code is run.")
        problems = _rerun.rerun(
            report,
            adapter=arguments.impl,
            python=arguments.python,
            pip_options=(arguments.pip_options or "").split(),
        )
    if not problems:
        print(f"{report['implementation']['name']}: {report['verdict']}, nothing contradicts it")
    return _tell(problems, _exit.NOT_CONFORMANT)


def _sha256(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise ReportError(f"wheel {path.name!r} cannot be read.") from error


def _text_of(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        if path.stat().st_size > MAX_BADGE_BYTES:
            raise ReportError(f"badge {path.name!r} exceeds {MAX_BADGE_BYTES} bytes.")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ReportError(f"badge {path.name!r} cannot be read.") from error


def mutants(arguments: argparse.Namespace) -> int:
    """Run the broken implementations, and check that each is caught as it declares."""
    areas = AREAS if arguments.area == "all" else tuple(arguments.area.split(","))
    if unknown := sorted(set(areas) - set(AREAS)):
        raise OptionError(f"--area {unknown[0]!r:.60} is unknown, but {AREAS} are known.")
    kills = _kill_run.kill(
        arguments.folder, areas, base=arguments.impl, jobs=arguments.jobs, cache=arguments.cache
    )
    if arguments.markdown is not None:
        frozen = _manifest.load_manifest()
        listed = {row.case for row in frozen.rows} if frozen else set()
        asked = {case for case in listed if area_of(case.partition("/")[0]) in areas}
        unfailed = asked - {case for found in kills for case in found.cases}
        page = _kill.to_markdown(kills, torchparts_conformance.__version__, unfailed)
        _render.write(arguments.markdown, page)
    registry = {id: r for id, r in load_registry().items() if r.area in areas}
    problems = _kill.problems(kills, registry)
    print(f"{sum(k.is_exact for k in kills)} of {len(kills)} mutants caught exactly as declared")
    return _tell(problems, _exit.SUITE_BROKEN)
