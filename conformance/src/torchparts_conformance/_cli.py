"""Edge: the command line. Each command is a function; bad input is one line and exit code 4."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from torchparts_conformance import _report
from torchparts_conformance._errors import ConformanceError

CASES = Path(__file__).parent / "cases"
EXIT_BAD_INPUT = 4
EXIT_SUITE_BROKEN = 5
_PASSED_ON = ("impl", "area", "device", "profile", "known_failures")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code."""
    arguments = _parser().parse_args(argv)
    command: Callable[[argparse.Namespace], int] = arguments.command
    try:
        return command(arguments)
    except ConformanceError as error:
        print(f"torchparts-conformance: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT


class _Parser(argparse.ArgumentParser):
    """A parser whose mistakes are one line and the suite's own exit code."""

    def error(self, message: str) -> None:  # type: ignore[override]  # argparse says NoReturn
        self.exit(EXIT_BAD_INPUT, f"{self.prog}: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="torchparts-conformance", description=__doc__)
    commands = parser.add_subparsers(required=True, parser_class=_Parser)
    run = commands.add_parser("run", help="hold an implementation to the requirements")
    run.set_defaults(command=_run)
    run.add_argument("--impl", help="short name or module:attribute")
    run.add_argument("--area", default="all")
    run.add_argument("--device", default="cpu", help="cpu, cuda or cpu,cuda")
    run.add_argument("--profile", default="all", help="profiles to claim")
    run.add_argument("--known-failures", type=Path)
    run.add_argument("--out", type=Path, help="folder for report.json, badge, matrix")
    return parser


def _run(arguments: argparse.Namespace) -> int:
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
    if status == EXIT_BAD_INPUT:
        return EXIT_BAD_INPUT
    if not path.exists():
        print("torchparts-conformance: the run ended without a report", file=sys.stderr)
        return EXIT_SUITE_BROKEN if status == EXIT_SUITE_BROKEN else 1
    report = _report.read(path)
    print(_report.summary(report))
    return _report.exit_code(report)
