"""Changes known to change nothing: equivalent.toml, an entry with a reason for each.

An entry names the package, the file below its source folder, the line of code without its
indentation, and the operator; where that is not one change alone, also what the line becomes.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mutation_points import Mutant, apply, points_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True)
class Entry:
    """One change that changes nothing, and why."""

    file: str
    line: str
    operator: str
    why: str
    becomes: str | None = None

    def covers(self, mutant: Mutant) -> bool:
        """Whether the mutant is this change."""
        point = mutant.point
        return (
            (point.file, point.operator, mutant.before) == (self.file, self.operator, self.line)
        ) and self.becomes in (None, mutant.after)


@dataclass(frozen=True)
class Known:
    """The entries of one package."""

    entries: Sequence[Entry] = ()

    def covers(self, mutant: Mutant) -> bool:
        """Whether the mutant is known to change nothing."""
        return any(entry.covers(mutant) for entry in self.entries)

    def stale(self, sources: Mapping[str, str]) -> list[str]:
        """Entries that no change of the sources matches any more."""
        return [
            f"{entry.file}: {entry.operator} of {entry.line!r}"
            for entry in self.entries
            if not self._is_possible(entry, sources.get(entry.file, ""))
        ]

    @staticmethod
    def _is_possible(entry: Entry, source: str) -> bool:
        made = (
            apply(point, source)
            for point in points_of(entry.file, source)
            if point.operator == entry.operator
        )
        return any(mutant is not None and entry.covers(mutant) for mutant in made)


def load(path: Path, package: str) -> Known:
    """Read the entries of one package; a reason may not be missing."""
    told = tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    entries = []
    for entry in told.get("mutant", ()):
        fields = {key: value for key, value in entry.items() if key != "package"}
        if not fields.get("why"):
            raise ValueError(
                f"equivalent.toml: entry for {entry.get('line')!r} has no reason, but each needs "
                "one. Say in `why` what makes the change no change."
            )
        if entry["package"] == package:
            entries.append(Entry(**fields))
    return Known(entries)
