"""Areas, profiles, levels and kinds of devices."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from pathlib import Path

PREFIXES: Mapping[str, str] = {
    "ckpt-wrap": "CW",
    "mod-tracker": "MT",
    "flat-param": "FP",
    "sac-policies": "SP",
}
AREAS = tuple(PREFIXES)
LEVELS = ("MUST", "SHOULD")
# Any device except the CPU.
ACCELERATOR = "accelerator"
# What the tests and the documentation of torch say. Every implementation is judged by it.
CORE = "core"
# Beyond torch: written for torchparts, and reported beside the verdict.
ROBUST = "robust"
OWN = "these are torchparts' own requirements, and no part of the verdict"
_DEVICE = re.compile(r"[a-z][a-z0-9]{0,15}")


def is_device(word: object) -> bool:
    """Return whether a word can be a kind of device; only torch knows which kinds exist."""
    return isinstance(word, str) and _DEVICE.fullmatch(word) is not None


def profile_order(profile: str) -> tuple[int, str]:
    """Sort core first, then robust, then the others by name."""
    first = (CORE, ROBUST)
    return (first.index(profile) if profile in first else len(first)), profile


def folder_of(area: str) -> str:
    """Return the name of an area in file and module names."""
    return area.replace("-", "_")


def area_of(folder: str) -> str:
    """Return the area whose files are in a folder."""
    return folder.replace("_", "-")


def area_of_path(path: Path) -> str | None:
    """Return the area of a file of cases, from the folder below `cases`."""
    for above, folder in itertools.pairwise(path.parts):
        if above == "cases" and area_of(folder) in AREAS:
            return area_of(folder)
    return None
