"""The options of a run, shared by the suite's command line and pytest's."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchparts_conformance._adapters import VARIABLE
from torchparts_conformance._claims import check_profiles
from torchparts_conformance._devices import accelerator, is_known
from torchparts_conformance._errors import OptionError
from torchparts_conformance._run import CASE_LIMIT_S, Settings
from torchparts_conformance.requirements._areas import (
    ACCELERATOR,
    AREAS,
    CORE,
    is_device,
    profile_order,
)
from torchparts_conformance.requirements._cases import load_registry

MAX_CASE_LIMIT_S = 86400.0


@dataclass(frozen=True)
class Option:
    """One option."""

    name: str
    help: str
    default: Any = None
    type: Callable[[str], Any] = str

    def add_to(self, add: Callable[..., Any]) -> None:
        """Declare the option with a parser's method."""
        add(self.flag, default=self.default, type=self.type, help=self.help)

    @property
    def flag(self) -> str:
        """The option as it is typed."""
        return f"--{self.name.replace('_', '-')}"


OPTIONS = (
    Option("impl", f"implementation: short name or module:attribute; else the variable {VARIABLE}"),
    Option("area", f"{', '.join(AREAS)} or all; comma-separated; default: all", "all"),
    Option(
        "device",
        "cpu, cuda, xpu...; comma-separated; all: every device of this machine; default: cpu",
        "cpu",
    ),
    Option(
        "profile",
        "profiles to run beside core, comma-separated, or all; default: those the adapter claims",
        "claimed",
    ),
    Option("case_limit", "seconds until a case is ended", CASE_LIMIT_S, float),
)
KNOWN_FAILURES = Option("known_failures", "TOML file of known failures", type=Path)
OUT = Option("out", "folder for the report and the badges", type=Path)
PYTEST_ONLY = (
    Option("mutant", "file.py::name of a fault to apply"),
    Option("requirement", "run only the cases of these ids, comma-separated", ""),
    Option("share", "folder/N: run the cases that no other process of the folder runs", type=Path),
)


def arguments(parsed: argparse.Namespace) -> list[str]:
    """Turn the options of a run back into command-line arguments."""
    values = ((option.flag, getattr(parsed, option.name)) for option in OPTIONS)
    return [f"{flag}={value}" for flag, value in values if value is not None]


def settings(option: Callable[[str], Any], spec: str) -> Settings:
    """Check options, which a function returns by name; return the settings of a run."""
    return Settings(
        spec=spec,
        areas=areas_of(option("area")),
        devices=_devices_of(option("device")),
        profiles=_profiles(option("profile")),
        out=option("out"),
        known_failures=option("known_failures"),
        mutant=option("mutant"),
        case_limit_s=_limit(option("case_limit")),
        requirements=frozenset(option("requirement").split(",")) - {""},
        share=option("share"),
    )


def areas_of(text: str) -> tuple[str, ...]:
    """Split the value of `--area`; `all` means every area."""
    wanted = set(AREAS) if text == "all" else set(text.split(","))
    if unknown := sorted(wanted - set(AREAS)):
        raise OptionError(f"--area {unknown[0]!r:.60} is unknown. Known are {', '.join(AREAS)}.")
    return tuple(area for area in AREAS if area in wanted)


def _devices_of(text: str) -> tuple[str, ...]:
    """Split the value of `--device`, CPU first; `all` is the CPU and the machine's accelerator."""
    here = accelerator() or ACCELERATOR
    wanted = {"cpu", here} if text == "all" else set(text.split(","))
    wanted = {here if word == ACCELERATOR else word for word in wanted}
    if unknown := sorted(w for w in wanted if w != here and not (is_device(w) and is_known(w))):
        raise OptionError(
            f"--device {unknown[0]!r:.60} is unknown. Give cpu or a kind that torch knows, such as "
            "cuda, without an index."
        )
    return tuple(sorted(wanted, key=lambda kind: (kind != "cpu", kind)))


def _profiles(text: str) -> tuple[str, ...] | None:
    if text == "claimed":
        return None
    registry = load_registry()
    known = {requirement.profile for requirement in registry.values()}
    chosen = known if text == "all" else {CORE, *text.split(",")}
    check_profiles(chosen, registry)
    return tuple(sorted(chosen, key=profile_order))


def _limit(seconds: float) -> float:
    if not 0 < seconds <= MAX_CASE_LIMIT_S:
        raise OptionError(
            f"--case-limit must be above 0 and at most {MAX_CASE_LIMIT_S:g}; got {seconds:g}."
        )
    return seconds
