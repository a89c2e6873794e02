"""What changed between two reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchparts_conformance.report._report import row_key


@dataclass(frozen=True)
class Change:
    """A row whose outcome is not what it was; where there is no row the outcome is "absent"."""

    id: str
    case: str
    device: str
    level: str
    before: str
    after: str

    @property
    def is_regression(self) -> bool:
        """Say whether something that passed does not pass any more."""
        return self.before == "pass"

    @property
    def blocks(self) -> bool:
        """Say whether a MUST regressed."""
        return self.is_regression and self.level == "MUST"

    def __str__(self) -> str:
        word = "regressed" if self.is_regression else "changed"
        where = f"{self.id} {self.level} {self.device} {self.case}"
        return f"{word:<9} {where}: {self.before} -> {self.after}"


def compare(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """Give what changed, regressions first."""
    before = {row_key(row): row for row in old["rows"]}
    after = {row_key(row): row for row in new["rows"]}
    changes = [
        Change(*key, _level(before, after, key), _outcome(before, key), _outcome(after, key))
        for key in sorted(before.keys() | after.keys())
        if _outcome(before, key) != _outcome(after, key)
    ]
    return sorted(changes, key=lambda change: not change.is_regression)


def _outcome(rows: Mapping[Any, Mapping[str, Any]], key: Any) -> str:
    return str(rows[key]["outcome"]) if key in rows else "absent"


def _level(before: Mapping[Any, Any], after: Mapping[Any, Any], key: Any) -> str:
    return str((after.get(key) or before[key])["level"])
