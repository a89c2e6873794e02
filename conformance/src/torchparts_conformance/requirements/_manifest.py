"""The frozen list of cases, and the fingerprints of the files they are in.

`manifest.lock.json` says which cases a version of the suite consists of. A run that lacks one of
them, or has changed a file, cannot be conformant, whatever its tests say.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchparts_conformance._errors import RegistryError
from torchparts_conformance._package import PACKAGE
from torchparts_conformance.requirements._registry import Requirement

LOCK = PACKAGE / "manifest.lock.json"
_FROZEN = ("spec/*.toml", "cases/*/*.py", "lists/*.json")


@dataclass(frozen=True, order=True)
class Row:
    """One requirement checked by one case."""

    id: str
    case: str


@dataclass(frozen=True)
class Manifest:
    """What a version of the suite consists of; `withdrawn` ids are never used again."""

    rows: tuple[Row, ...]
    files: Mapping[str, str]
    withdrawn: tuple[str, ...] = ()

    @property
    def sha256(self) -> str:
        """Fingerprint the rows, the files and the withdrawn ids."""
        return hashlib.sha256(canonical(self.to_json()).encode()).hexdigest()

    def asked_for(
        self,
        registry: Mapping[str, Requirement],
        *,
        areas: Collection[str],
        devices: Iterable[str],
    ) -> Iterator[tuple[Row, str]]:
        """Give each row of some areas with each device it has to run on.

        Raises:
            RegistryError: a row is of a requirement that is not there any more.
        """
        devices = tuple(devices)
        for row in self.rows:
            requirement = registry.get(row.id)
            if requirement is None:
                raise RegistryError(
                    f"the frozen list has {row.id} ({row.case}), but no such requirement is there. "
                    "Put it back, or freeze the cases again."
                )
            if requirement.area in areas:
                yield from ((row, device) for device in devices if requirement.is_for(device))

    def to_json(self) -> dict[str, Any]:
        """Give the content of the lock file."""
        return {
            "rows": [[row.id, row.case] for row in self.rows],
            "files": dict(sorted(self.files.items())),
            "withdrawn": sorted(self.withdrawn),
        }


def canonical(value: Any) -> str:
    """Write JSON in the one way that is hashed: sorted keys, no spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def load_manifest(path: Path = LOCK) -> Manifest | None:
    """Read the frozen list; there is none before the first one is made."""
    if not path.exists():
        return None
    data = json.loads(path.read_text(encoding="utf-8"))
    rows = tuple(Row(id, case) for id, case in data["rows"])
    return Manifest(rows, data["files"], tuple(data["withdrawn"]))


def freeze(rows: Iterable[Row], *, path: Path = LOCK) -> Manifest:
    """Write the frozen list; ids it no longer has are kept as withdrawn."""
    before = load_manifest(path)
    kept = tuple(sorted(set(rows)))
    gone = {row.id for row in before.rows} | set(before.withdrawn) if before else set()
    withdrawn = tuple(sorted(gone - {row.id for row in kept}))
    manifest = Manifest(kept, file_fingerprints(), withdrawn)
    path.write_text(json.dumps(manifest.to_json(), indent=1) + "\n", encoding="utf-8")
    return manifest


def file_fingerprints(package: Path = PACKAGE) -> dict[str, str]:
    """Hash every requirement, case and list, by path inside the package, whatever its line ends."""
    paths = [p for pattern in _FROZEN for p in package.glob(pattern)]
    return {path.relative_to(package).as_posix(): _sha256_of_text(path) for path in sorted(paths)}


def _sha256_of_text(path: Path) -> str:
    return hashlib.sha256(path.read_bytes().replace(b"\r\n", b"\n")).hexdigest()
