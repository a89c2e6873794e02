"""Areas, profiles, levels and kinds of devices."""

from __future__ import annotations

import re
from collections.abc import Mapping

PREFIXES: Mapping[str, str] = {
    "ckpt-wrap": "CW",
    "mod-tracker": "MT",
    "flat-param": "FP",
    "sac-policies": "SP",
    "combined": "CB",
}
AREAS = tuple(PREFIXES)
PARTS = tuple(area for area in AREAS if area != "combined")
LEVELS = ("MUST", "SHOULD")
# Any device except the CPU. A requirement may also name one kind.
ACCELERATOR = "accelerator"
# Every implementation is judged by these; other profiles are capabilities that it may claim.
CLAIMED_BY_ALL = ("core", "robust")
_DEVICE = re.compile(r"[a-z][a-z0-9]{0,15}")


def is_device(word: object) -> bool:
    """Return whether a word can be a kind of device; only torch knows which kinds exist."""
    return isinstance(word, str) and _DEVICE.fullmatch(word) is not None


def profile_order(profile: str) -> tuple[int, str]:
    """Sort core first, then robust, then capabilities by name."""
    is_common = profile in CLAIMED_BY_ALL
    return (CLAIMED_BY_ALL.index(profile) if is_common else len(CLAIMED_BY_ALL)), profile


def folder_of(area: str) -> str:
    """Return the name of an area in file and module names."""
    return area.replace("-", "_")


def area_of(folder: str) -> str:
    """Return the area whose files are in a folder."""
    return folder.replace("_", "-")
