"""The requirements, read from the TOML files in `spec/` and checked against their own rules.

Rule 1: an id is permanent, and starts with the prefix of its area.
Rule 2: a requirement names the source test it comes from, or says in a rationale why it exists.
Rule 3: what a rationale names as an address is one; see `_addresses`.
Rule 4: the text says MUST, SHOULD or MAY, the same word as the level.
Rule 5: `[groups]` divides an area by what can stand alone. A requirement is of the group that it
names; without one it is of the first in core and robust, and of none in a capability.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchparts_conformance import _toml
from torchparts_conformance._errors import RegistryError
from torchparts_conformance._package import PACKAGE
from torchparts_conformance.requirements._addresses import addresses

PREFIXES: Mapping[str, str] = {
    "ckpt-wrap": "CW",
    "mod-tracker": "MT",
    "flat-param": "FP",
    "sac-policies": "SP",
    "combined": "CB",
}
AREAS = tuple(PREFIXES)
PARTS = tuple(area for area in AREAS if area != "combined")
LEVELS = ("MUST", "SHOULD", "MAY")
# The word for a device of any other kind than the CPU; an entry may also name one kind.
ACCELERATOR = "accelerator"
# Every implementation is held to these; any other profile is a capability that it may claim.
CLAIMED_BY_ALL = ("core", "robust")
SPEC = PACKAGE / "spec"

_SOURCE = re.compile(r"[\w/]+\.py::\w+::\w+")
_PROFILE = re.compile(r"[a-z][a-z0-9-]{0,31}")
_DEVICE = re.compile(r"[a-z][a-z0-9]{0,15}")
_NEEDED = {"level", "profile", "devices", "since", "text", "source"}
_ALLOWED = _NEEDED | {"rationale", "torch_deviation", "group"}


@dataclass(frozen=True)
class Requirement:
    """One sentence that an implementation has to make true.

    `rationale` is empty where the source test says it all, `torch_deviation` is empty unless
    torch's own implementation is known to break this requirement, `group` is empty where the
    profile is not divided.
    """

    id: str
    area: str
    level: str
    profile: str
    devices: tuple[str, ...]
    since: str
    text: str
    source: str
    rationale: str = ""
    torch_deviation: str = ""
    group: str = ""

    def is_for(self, device: str) -> bool:
        """Say whether it has to hold on a kind of device."""
        return device in self.devices or (device != "cpu" and ACCELERATOR in self.devices)


def is_device(word: object) -> bool:
    """Say whether a word can be a kind of device; which there are is the machine's business."""
    return isinstance(word, str) and _DEVICE.fullmatch(word) is not None


def folder_of(area: str) -> str:
    """Give the name an area has in file and module names."""
    return area.replace("-", "_")


def area_of(folder: str) -> str:
    """Give the area whose files are in a folder of this name."""
    return folder.replace("_", "-")


def load_registry(spec: Path | None = None) -> dict[str, Requirement]:
    """Read the requirements of every area, by id, in order of area and id.

    Raises:
        RegistryError: a file is not TOML, or an entry breaks a rule.
    """
    return {
        requirement.id: requirement for area in AREAS for requirement in load_area(area, spec=spec)
    }


def load_area(area: str, *, spec: Path | None = None) -> list[Requirement]:
    """Read one area's requirements in order of id; an area without a file has none.

    Raises:
        RegistryError: the file is not TOML, or an entry breaks a rule.
    """
    entries, groups = _read(area, spec)
    return [_requirement(id, area, entry, groups) for id, entry in sorted(entries.items())]


def load_groups(area: str, *, spec: Path | None = None) -> dict[str, str]:
    """Give what an area is divided into, with what each is about.

    Raises:
        RegistryError: the file is not TOML, or the table is none of texts.
    """
    return _read(area, spec)[1]


def _read(area: str, spec: Path | None) -> tuple[dict[str, Any], dict[str, str]]:
    path = (spec or SPEC) / f"{folder_of(area)}.toml"
    if not path.exists():
        return {}, {}
    try:
        entries = _toml.parse(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RegistryError(f"{path.name}: {error}, but requirements are TOML.") from error
    groups = entries.pop("groups", {})
    if not isinstance(groups, dict) or not all(map(_is_text, groups.values())):
        raise RegistryError(f"{path.name}: groups is {groups!r:.120}, but it goes to sentences.")
    return entries, groups


def _requirement(id: str, area: str, entry: Any, groups: Mapping[str, str]) -> Requirement:
    if reason := _violation(id, area, entry) or _violation_in_group(entry, groups):
        raise RegistryError(f"{folder_of(area)}.toml: {id} {reason}.")
    default = next(iter(groups), "") if entry["profile"] in CLAIMED_BY_ALL else ""
    facts = {"group": default, **entry, "devices": tuple(entry["devices"])}
    return Requirement(**{**facts, "id": id, "area": area})


def _violation_in_group(entry: Mapping[str, Any], groups: Mapping[str, str]) -> str:
    group = entry.get("group")
    if group is not None and group not in groups:
        return f"has group {group!r}, but groups are {', '.join(groups) or 'none'}"
    return ""


def _violation(id: str, area: str, entry: Any) -> str:
    """Say what is wrong with an entry, or give an empty string."""
    if not re.fullmatch(PREFIXES[area] + r"-\d{3}", id):
        return f"is not an id of {area}, but those read {PREFIXES[area]}-001"
    if not isinstance(entry, dict):
        return "is no table, but a requirement is one"
    if missing := sorted(_NEEDED - entry.keys()):
        return f"lacks {missing}, but every requirement has them"
    if extra := sorted(entry.keys() - _ALLOWED):
        return f"has {extra}, but no such key exists"
    if wrong := sorted(key for key in entry if key != "devices" and not _is_text(entry[key])):
        return f"has no text in {wrong}, but these are sentences or words"
    return _violation_in_values(entry)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _violation_in_values(entry: Mapping[str, Any]) -> str:
    devices = entry["devices"]
    if entry["level"] not in LEVELS:
        return f"has level {entry['level']!r}, but levels are {', '.join(LEVELS)}"
    if not isinstance(devices, list) or not devices or not all(map(is_device, devices)):
        return f"has devices {devices!r}, but devices are words such as cpu and accelerator"
    if not _PROFILE.fullmatch(entry["profile"]):
        return f"has profile {entry['profile']!r}, but a profile is a short lower-case word"
    if not re.search(rf"\b{entry['level']}\b", entry["text"]):
        return f"does not say {entry['level']} in its text, but that is its level"
    if entry["source"] == "none" and "rationale" not in entry:
        return "has neither source nor rationale, but a requirement comes from somewhere"
    if entry["source"] != "none" and not _SOURCE.fullmatch(entry["source"]):
        return f"has source {entry['source']!r}, but a source is file.py::Class::test or none"
    return _violation_in_addresses(entry)


def _violation_in_addresses(entry: Mapping[str, Any]) -> str:
    try:
        addresses(f"{entry.get('rationale', '')} {entry.get('torch_deviation', '')}")
    except ValueError as error:
        return f"gives a reason in which {error}"
    return ""
