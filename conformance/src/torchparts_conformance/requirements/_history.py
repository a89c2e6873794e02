"""The frozen list of each version of the suite, by which an implementation can still be judged.

Rule 1: `lists/` has a file for each version; only that of the version that is installed is ever
written again, and each says the hash of its own content.
Rule 2: a list judges where every case of it is still there with the same text. Its requirements
count as they were then: level, profile, group, devices and sentence.
Rule 3: a requirement's `since` is the first version whose list has it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from torchparts_conformance._errors import OptionError, RegistryError
from torchparts_conformance._package import PACKAGE
from torchparts_conformance.requirements._case_text import fingerprint
from torchparts_conformance.requirements._manifest import Manifest, Row, canonical
from torchparts_conformance.requirements._registry import PREFIXES, Requirement, area_of

LISTS = PACKAGE / "lists"
SCHEMA = "urn:torchparts:conformance:list:1"
_FACTS = ("level", "profile", "group", "devices", "since", "text")
_SHOWN = 3


@dataclass(frozen=True)
class FrozenList:
    """What one version of the suite consisted of.

    Attributes:
        version: of the suite.
        requirements: as they were, by id; without what they come from.
        rows: each requirement with each case of it.
        cases: the fingerprint of each case's text, by its name without parameters.
    """

    version: str
    requirements: Mapping[str, Requirement]
    rows: tuple[Row, ...]
    cases: Mapping[str, str]

    @property
    def sha256(self) -> str:
        """Fingerprint everything in the list."""
        return hashlib.sha256(canonical(self.content()).encode()).hexdigest()

    @property
    def manifest(self) -> Manifest:
        """The rows as something to ask for; files are those of a suite, not of a list."""
        return Manifest(self.rows, {})

    def content(self) -> dict[str, Any]:
        """Give what the file says, without the hash."""
        facts = {id: asdict(found) for id, found in self.requirements.items()}
        return {
            "schema": SCHEMA,
            "version": self.version,
            "requirements": {id: {word: f[word] for word in _FACTS} for id, f in facts.items()},
            "rows": [[row.id, row.case] for row in self.rows],
            "cases": dict(self.cases),
        }

    def named(self) -> dict[str, str]:
        """Give what a report says of the list that judged."""
        return {"version": self.version, "sha256": self.sha256}


def function_of(case: str) -> str:
    """Give the name of a case without its parameters."""
    return case.partition("[")[0]


def make(
    version: str, rows: Iterable[Row], registry: Mapping[str, Requirement], *, cases: Path
) -> FrozenList:
    """Make the list of a version from its rows, its requirements and the folder of its cases."""
    kept = tuple(sorted(set(rows)))
    functions = sorted({function_of(row.case) for row in kept})
    texts = {name: found for name in functions if (found := text_now(name, cases))}
    ids = sorted({row.id for row in kept})
    return FrozenList(version, {id: registry[id] for id in ids}, kept, texts)


def text_now(function: str, cases: Path) -> str:
    """Give the fingerprint of a case as it is now; empty where there is no such case."""
    file, _, name = function.partition("::")
    try:
        return fingerprint(cases / file, name)
    except (KeyError, OSError):
        return ""


def write(made: FrozenList, folder: Path = LISTS) -> None:
    """Write the list of a version, a line for each entry, with the hash of its content."""
    content = {**made.content(), "sha256": made.sha256}
    lines = (f"{json.dumps(word)}: {_lines(content[word])}" for word in sorted(content))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{made.version}.json"
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def _lines(value: Any) -> str:
    if isinstance(value, list):
        return "[\n" + ",\n".join(f" {canonical(entry)}" for entry in value) + "\n]"
    if isinstance(value, dict):
        entries = [f" {json.dumps(key)}: {canonical(value[key])}" for key in sorted(value)]
        return "{\n" + ",\n".join(entries) + "\n}"
    return canonical(value)


def versions(folder: Path = LISTS) -> list[str]:
    """Give the versions that have a list, oldest first."""
    return sorted((path.stem for path in folder.glob("*.json")), key=_order)


def _order(version: str) -> Version:
    try:
        return Version(version)
    except InvalidVersion as error:
        raise RegistryError(
            f"lists/{version:.60}.json is named after no version, but each list is of one. "
            "Take it away."
        ) from error


def read(version: str, folder: Path = LISTS) -> FrozenList:
    """Read the list of a version.

    Raises:
        OptionError: there is none.
        RegistryError: its content is not what was frozen.
    """
    known = versions(folder)
    if version not in known:
        raise OptionError(
            f"--suite-version {version!r:.60} is unknown, but this suite has the lists of "
            f"{', '.join(known) or 'no version'}. Name one of them, or install "
            "the torchparts-conformance of that version and run it."
        )
    return _parse((folder / f"{version}.json").read_bytes(), version)


def others(version: str, folder: Path = LISTS) -> dict[str, FrozenList]:
    """Give the lists of all versions but one."""
    return {other: read(other, folder) for other in versions(folder) if other != version}


def _parse(content: bytes, version: str) -> FrozenList:
    try:
        data = json.loads(content.decode())
        made = _list_from(data)
        is_whole = (data["version"], data["sha256"]) == (version, made.sha256)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        is_whole = False
    if not is_whole:
        raise RegistryError(
            f"lists/{version:.60}.json is not what its hash says, but a frozen list is never "
            "changed. Install torchparts-conformance again, or restore the file."
        )
    return made


def _list_from(data: Mapping[str, Any]) -> FrozenList:
    areas = {prefix: area for area, prefix in PREFIXES.items()}
    requirements = {
        id: Requirement(
            id=id,
            area=areas[id.partition("-")[0]],
            source="none",
            **{**facts, "devices": tuple(facts["devices"])},
        )
        for id, facts in data["requirements"].items()
    }
    rows = tuple(Row(id, case) for id, case in data["rows"])
    return FrozenList(data["version"], requirements, rows, data["cases"])


def refuse_changed(chosen: FrozenList, *, areas: Collection[str], cases: Path) -> None:
    """Refuse a list of which a case is not what it was, in the areas that are asked for.

    Raises:
        OptionError: a case's text has changed, or it has gone.
    """
    here = {f for f in chosen.cases if area_of(f.partition("/")[0]) in areas}
    now = {name: text_now(name, cases) for name in sorted(here)}
    gone = [name for name, text in now.items() if not text]
    other = [name for name, text in now.items() if text and text != chosen.cases[name]]
    if gone or other:
        said = [f"{len(found)} {word} ({_some(found)})" for word, found in _named(gone, other)]
        raise OptionError(
            f"--suite-version {chosen.version} cannot judge here: of its {len(now)} cases "
            f"{' and '.join(said)}, but a list judges with the cases it was made of. Run "
            f"torchparts-conformance=={chosen.version}, or name areas whose cases are the same."
        )


def _named(gone: list[str], other: list[str]) -> Iterable[tuple[str, list[str]]]:
    return ((word, found) for word, found in (("are gone", gone), ("have changed", other)) if found)


def _some(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (" ..." if len(names) > _SHOWN else "")


def problems(registry: Mapping[str, Requirement], lists: Iterable[FrozenList]) -> list[str]:
    """Say which requirement's `since` is not the first version whose list has it (Rule 3).

    Args:
        registry: the requirements of the suite that is installed.
        lists: of every version, oldest first.
    """
    first: dict[str, str] = {}
    for found in lists:
        for id in found.requirements:
            first.setdefault(id, found.version)
    return [
        f"{id} says since {registry[id].since}, but {version} was the first list that had it"
        for id, version in first.items()
        if id in registry and registry[id].since != version
    ]
