"""Edge: the commands that run an implementation or look for one; each gives an exit code."""

from __future__ import annotations

import argparse
import importlib.metadata
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from torchparts_conformance import _adapters, _exit, _report
from torchparts_conformance._cases import CASES, find_cases
from torchparts_conformance._protocol import Implementation
from torchparts_conformance._registry import CLAIMED_BY_ALL, PARTS, load_registry

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
        _exit.say("torchparts-conformance: the run ended without a report", is_wrong=True)
        return _exit.SUITE_BROKEN if status == _exit.SUITE_BROKEN else _exit.NOT_CONFORMANT
    report = _report.read(path)
    _exit.say(*_report.summary(report))
    return _report.exit_code(report)


def list_adapters(_: argparse.Namespace) -> int:
    """Print every implementation that has a short name."""
    for name, path in sorted(_adapters.known_adapters().items()):
        origin = "shipped" if name in _adapters.SHIPPED else "installed"
        _exit.say(f"{name:<16} {origin:<10} {path}")
    return 0


def doctor(arguments: argparse.Namespace) -> int:
    """Import an adapter and its parts, and name what core and robust cases will not find."""
    _see_working_directory()
    implementation = _adapters.load_implementation(arguments.impl)
    _exit.say(f"{implementation.name} {implementation.version}, protocol {implementation.protocol}")
    for name in implementation.distributions:
        _exit.say(f"distribution {name}: {_installed(name)}")
    missing = [line for part in PARTS for line in _examine(implementation, part)]
    _exit.say(*(missing or ["nothing is missing"]))
    return _exit.NOT_CONFORMANT if missing else 0


def _see_working_directory() -> None:
    """Import from where `run` does: in the working directory, where a script does not look."""
    here = str(Path.cwd())
    if here not in sys.path and not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, here)


def _installed(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _examine(implementation: Implementation, part: str) -> Iterable[str]:
    if part not in implementation.parts:
        _exit.say(f"{part}: not provided")
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
    _exit.say(f"{part}: {len(names) - len(missing)} of {len(names)} names found")
    yield from (f"{part}: {name} is missing" for name in missing)
