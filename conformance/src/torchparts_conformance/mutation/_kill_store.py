"""Remembers what each mutant made fail, so that a run that was stopped can be continued.

An entry is found again only if the mutant and what it shares with others, the cases and
requirements of its area, the suite, the implementation it breaks, torch and Python are the same.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

from torchparts_conformance._package import PACKAGE
from torchparts_conformance.requirements import _manifest
from torchparts_conformance.requirements._registry import folder_of
from torchparts_conformance.subject import _identity
from torchparts_conformance.subject._adapters import load_implementation

Failed = list[tuple[str, str]]


class Store:
    """A file of JSON lines, read once and appended to; without a path nothing is remembered."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._known = dict(_entries(path)) if path and path.exists() else {}

    def get(self, key: str) -> Failed | None:
        """Give what failed, or None if it is not known."""
        return self._known.get(key)

    def put(self, key: str, failed: Failed) -> None:
        """Remember what failed."""
        with self._lock:
            self._known[key] = failed
            if self._path is not None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"key": key, "failed": failed}) + "\n")


def _entries(path: Path) -> list[tuple[str, Failed]]:
    """Read the entries; a last line that was cut short is as good as none."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            entry = json.loads(line)
            found.append((entry["key"], [(id, case) for id, case in entry["failed"]]))
        except (ValueError, KeyError, TypeError):
            continue
    return found


def fingerprint(area: str, base: str, requirements: Iterable[str] = ()) -> str:
    """Fingerprint everything but the mutant that decides what fails in an area.

    Args:
        area: whose cases run.
        base: the working implementation.
        requirements: where there are any, only their cases run.
    """
    folder = folder_of(area)
    cases = {
        name: digest
        for name, digest in _manifest.file_fingerprints().items()
        if f"/{folder}" in name
    }
    suite = {path.as_posix(): _sha256(PACKAGE / path) for path in sorted(_sources())}
    facts = {
        "cases": cases,
        "requirements": sorted(requirements),
        "suite": suite,
        "implementation": _identity.describe_implementation(load_implementation(base), base),
        "environment": _identity.describe_environment(),
    }
    return hashlib.sha256(_manifest.canonical(facts).encode()).hexdigest()


def _sources() -> Iterator[Path]:
    """Give the suite's own source, without the cases and the adapters, relative to its folder."""
    for path in PACKAGE.rglob("*.py"):
        if (inside := path.relative_to(PACKAGE)).parts[0] not in ("cases", "adapters"):
            yield inside


def key(area_fingerprint: str, path: Path, name: str) -> str:
    """Give the key of one mutant of a file; an empty name means no mutant at all.

    What files of mutants share is in folders beside them, and part of the key.
    """
    files = [path, *sorted(path.parent.glob("*/*.py"))] if name else []
    words = [area_fingerprint, *map(_sha256, files), name]
    return hashlib.sha256(_manifest.canonical(words).encode()).hexdigest()


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
