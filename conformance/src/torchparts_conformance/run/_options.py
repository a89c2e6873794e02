"""The options of a run, for the suite's command line and for pytest's alike."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchparts_conformance.requirements._areas import AREAS
from torchparts_conformance.subject._adapters import VARIABLE

CASE_LIMIT_S = 300.0


@dataclass(frozen=True)
class Option:
    """One option; where nothing is given its value is `default`."""

    name: str
    help: str
    default: Any = None
    type: Callable[[str], Any] = str

    @property
    def flag(self) -> str:
        """As it is written on a command line."""
        return f"--{self.name.replace('_', '-')}"

    def add_to(self, add: Callable[..., Any]) -> None:
        """Declare it with a parser's method."""
        add(self.flag, default=self.default, type=self.type, help=self.help)


OPTIONS = (
    Option("impl", f"implementation: short name or module:attribute; else the variable {VARIABLE}"),
    Option("area", f"{', '.join(AREAS)} or all; commas between; default: all", "all"),
    Option("device", "cpu, cuda, xpu...; commas between; all: what is here; default: cpu", "cpu"),
    Option("profile", "profiles to claim; commas between; default: all", "all"),
    Option("known_failures", "TOML file of announced failures", type=Path),
    Option("order", "listed, reversed or seed:N; no outcome depends on it", "listed"),
    Option("case_limit", "seconds until a case is ended", CASE_LIMIT_S, float),
)
OUT = Option("out", "folder for the report, badges and matrix", type=Path)


def arguments(parsed: argparse.Namespace) -> list[str]:
    """Give what was parsed as the arguments that give it again."""
    values = {option.flag: getattr(parsed, option.name) for option in OPTIONS}
    return [f"{flag}={value}" for flag, value in values.items() if value is not None]
