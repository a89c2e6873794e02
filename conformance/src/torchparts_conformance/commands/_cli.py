"""The command line. Bad input is one line on standard error, and exit code 4."""

from __future__ import annotations

import argparse
import collections
import difflib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from torchparts_conformance import _console
from torchparts_conformance._errors import ConformanceError
from torchparts_conformance.commands import _listing, _maintenance, _reports, _runs
from torchparts_conformance.run import _options


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code."""
    arguments = _parser().parse_args(argv)
    command: Callable[[argparse.Namespace], int] = arguments.command
    try:
        return command(arguments)
    except ConformanceError as error:
        return _console.fail([f"torchparts-conformance: {error}"], _console.BAD_INPUT)
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _console.NOT_CONFORMANT
    except OSError as error:
        return _console.fail([_unusable(error)], _console.BAD_INPUT)
    except KeyboardInterrupt:
        return _console.fail(["torchparts-conformance: interrupted"], _console.NOT_CONFORMANT)


def _unusable(error: OSError) -> str:
    return (
        f"torchparts-conformance: {error.filename or 'a file'} cannot be used: "
        f"{error.strerror or error}. Name another."
    )


class _Parser(argparse.ArgumentParser):
    """A parser whose mistakes are one line and the suite's own exit code.

    Rule 1: options that are unknown are told first, all of them, whatever else is missing.
    Rule 2: an option that takes one value is given once.
    """

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, after the names of all options have been looked at."""
        given = sys.argv[1:] if args is None else list(args)
        if self._subparsers is None and (wrong := self._wrong_options(given)):
            self.error("; ".join(wrong))
        return super().parse_known_args(given, namespace)

    def _wrong_options(self, given: Sequence[str]) -> list[str]:
        flags = [word.partition("=")[0] for word in given if word.startswith("--") and word != "--"]
        flags = [flag for flag in flags if " " not in flag]  # a value may look like an option
        meant = [self._meant(flag) for flag in flags]
        unknown = [self._unknown(f) for f, name in zip(flags, meant, strict=True) if not name]
        once = {
            f for f, a in self._option_string_actions.items() if type(a) is argparse._StoreAction
        }
        return unknown + [
            f"{name} is given {count} times, but one value is used"
            for name, count in collections.Counter(meant).items()
            if count > 1 and name in once
        ]

    def _meant(self, flag: str) -> str:
        """Give the option that is meant: by its name, or by a beginning that argparse takes."""
        known = self._option_string_actions
        begun = [name for name in known if name.startswith(flag)]
        return flag if flag in known else next(iter(begun), "")

    def _unknown(self, flag: str) -> str:
        near = difflib.get_close_matches(flag, self._option_string_actions, n=1)
        return f"option {flag!r:.60} is unknown, but " + (
            f"{near[0]} is near" if near else "--help lists those that are known"
        )

    def error(self, message: str) -> NoReturn:
        _console.say(f"{self.prog}: {message}", is_wrong=True)
        self.exit(_console.BAD_INPUT)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="torchparts-conformance",
        description="Hold implementations of training parts to their requirements.",
    )
    commands = parser.add_subparsers(required=True, parser_class=_Parser, metavar="COMMAND")
    _add_running(commands)
    _add_reading(commands)
    _add_listing(commands)
    _add_keeping(commands)
    return parser


def _add(
    commands: argparse._SubParsersAction[_Parser],
    name: str,
    command: Callable[[argparse.Namespace], int],
) -> argparse.ArgumentParser:
    text = (command.__doc__ or "").strip().partition("\n")[0]
    parser = commands.add_parser(name, help=text, description=text)
    parser.set_defaults(command=command)
    return parser


def _add_running(commands: argparse._SubParsersAction[_Parser]) -> None:
    run = _add(commands, "run", _runs.run)
    for option in (*_options.OPTIONS, _options.OUT):
        option.add_to(run.add_argument)
    run.add_argument("--explain", metavar="ID", help="run one requirement and show everything")
    _add(commands, "list", _runs.list_adapters)
    doctor = _add(commands, "doctor", _runs.doctor)
    doctor.add_argument("impl", nargs="?", help="short name or module:attribute")


def _add_reading(commands: argparse._SubParsersAction[_Parser]) -> None:
    matrix = _add(commands, "matrix", _reports.matrix)
    matrix.add_argument("reports", type=Path, nargs="+")
    matrix.add_argument("--html", type=Path)
    matrix.add_argument("--markdown", type=Path)
    badge = _add(commands, "badge", _reports.badge)
    badge.add_argument("report", type=Path)
    badge.add_argument("--out", type=Path, required=True, help="folder for the badges")
    diff = _add(commands, "diff", _reports.diff)
    diff.add_argument("old", type=Path)
    diff.add_argument("new", type=Path)
    _add_verify(commands)


def _add_verify(commands: argparse._SubParsersAction[_Parser]) -> None:
    verify = _add(commands, "verify", _reports.verify)
    verify.add_argument("report", type=Path)
    verify.add_argument("badge", type=Path, nargs="?")
    verify.add_argument("--distribution", help="name or name==version it must be about")
    verify.add_argument("--wheel", type=Path, help="file the implementation was installed from")
    verify.add_argument("--rerun", action="store_true", help="run again in a fresh environment")
    verify.add_argument("--impl", help="with --rerun: the implementation to run")
    _add_environment(verify, when="with --rerun: ")


def _add_environment(parser: argparse.ArgumentParser, *, when: str = "") -> None:
    """Add the options of a fresh environment."""
    parser.add_argument("--python", help=f"{when}interpreter of a ready environment")
    parser.add_argument(
        "--install",
        type=Path,
        action="append",
        default=[],
        metavar="PATH",
        help=f"{when}a wheel or folder to install; may be given several times",
    )
    parser.add_argument(
        "--reuse-torch",
        action="store_true",
        help=f"{when}see torch and pytest of this environment instead of installing them",
    )
    parser.add_argument("--pip-options", help=f"{when}passed on to pip install")


def _add_listing(commands: argparse._SubParsersAction[_Parser]) -> None:
    submit = _add(commands, "submit", _listing.submit)
    submit.add_argument("report", type=Path)
    submit.add_argument("--impl", required=True, help="the adapter that was run")
    submit.add_argument("--contact", required=True, help="https or mail address that is read")
    submit.add_argument("--source", required=True, help="https address of the repository")
    submit.add_argument("--to", type=Path, required=True, help="folder of the list")
    recheck = _add(commands, "recheck", _listing.recheck)
    recheck.add_argument("entry", type=Path, help="file of one implementation and version")
    _add_environment(recheck)


def _add_keeping(commands: argparse._SubParsersAction[_Parser]) -> None:
    _add(commands, "trace", _maintenance.trace)
    spec = _add(commands, "spec", _maintenance.spec)
    spec.add_argument("folder", type=Path, help="folder of the requirement pages")
    publish = _add(commands, "publish", _maintenance.publish)
    publish.add_argument("results", type=Path, help="the results file")
    publish.add_argument("reports", type=Path, nargs="+", help="reports to put into it")
    mutants = _add(commands, "mutants", _maintenance.mutants)
    mutants.add_argument("folder", type=Path, help="folder of <area>_<topic>.py files")
    mutants.add_argument("--area", default="all", help="areas, with commas between; default: all")
    mutants.add_argument("--requirement", help="try these only; ids with commas between")
    mutants.add_argument("--impl", default="ours", help="the working implementation to break")
    mutants.add_argument("--jobs", type=int, default=2, help="processes at a time; default: 2")
