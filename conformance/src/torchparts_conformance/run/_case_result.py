"""One case on one device as pytest collected it: its place, its name, its outcome so far."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from torchparts_conformance.requirements._areas import AREAS, area_of, folder_of
from torchparts_conformance.requirements._needs import Needs
from torchparts_conformance.requirements._requirement import Requirement

_FOLDERS = {folder_of(area) for area in AREAS}


@dataclass
class CaseResult:
    """One case on one device: the requirements it checks there, and what came out so far.

    `where` is the line of the case, the adapter and whatever raised; `missing` says what of the
    part the case needs and would not find.
    """

    case: str
    device: str
    requirements: tuple[Requirement, ...]
    outcome: str = "not_run"
    reason: str = ""
    where: str = ""
    missing: str = ""
    needs: Needs = field(default_factory=Needs)
    duration_s: float = 0.0


def area_of_path(path: Path) -> str | None:
    """Give the area a file's cases belong to: the folder below `cases`."""
    for above, folder in itertools.pairwise(path.parts):
        if above == "cases" and folder in _FOLDERS:
            return area_of(folder)
    return None


def is_case_path(path: Path) -> bool:
    """Say whether a file is one of the suite's cases."""
    return area_of_path(path) is not None


def device_of(item: pytest.Item) -> str:
    """Give the device an item runs on."""
    callspec = getattr(item, "callspec", None)
    return "cpu" if callspec is None else str(callspec.params.get("device", "cpu"))


def case_name(item: pytest.Item) -> str:
    """Name a case by area folder, file, function and parameters, the device left out."""
    device = device_of(item)
    path = Path(item.path)
    folder = next(part for part in reversed(path.parts[:-1]) if part in _FOLDERS)
    _, bracket, parameters = item.name.partition("[")
    words = [word for word in parameters.rstrip("]").split("-") if word != device]
    inside = f"[{'-'.join(words)}]" if bracket and words else ""
    return f"{folder}/{path.name}::{item.name.partition('[')[0]}{inside}"
