"""The implementation under test in this process, optionally with a fault."""

from __future__ import annotations

import gc
import sys
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torchparts_conformance import _adapters
from torchparts_conformance._implementation import Implementation
from torchparts_conformance.mutants import load_mutant


@dataclass(frozen=True)
class Subject:
    """An implementation by its `--impl` text, and the fault (`file.py::name`) in it.

    Worker processes get both strings, so that every rank builds the same subject.
    """

    spec: str
    mutant: str | None = None

    @cached_property
    def implementation(self) -> Implementation:
        """Import the adapter once."""
        return _adapters.load_implementation(self.spec)

    def part(self, area: str) -> Any:
        """Return the object under test for an area."""
        part = _adapters.load_part(self.implementation, area)
        if self.mutant is None:
            return part
        mutant = load_mutant(self.mutant)
        return mutant.apply(part) if mutant.area == area else part


_frozen_modules = 0


def freeze_imports() -> None:
    """Exempt imported objects from garbage collection, since cases collect several times each.

    With torch imported, a collection takes a quarter of a second.
    """
    global _frozen_modules
    if len(sys.modules) > _frozen_modules + 50:
        gc.collect()
        gc.freeze()
        _frozen_modules = len(sys.modules)
