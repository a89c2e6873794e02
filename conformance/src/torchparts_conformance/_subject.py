"""The implementation under test in this process, optionally with a fault."""

from __future__ import annotations

import gc
import sys
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torchparts_conformance import _adapters
from torchparts_conformance._implementation import Implementation
from torchparts_conformance._worker import find_function
from torchparts_conformance.mutants import load_mutant


@dataclass(frozen=True)
class Subject:
    """An implementation by its `--impl` text, and the fault (`file.py::name`) in it.

    Ranks get both strings, so that every rank builds the same subject.
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

    def modules(self) -> list[str]:
        """Return the modules of the adapter and of its parts, as far as they are known by name."""
        adapter = _adapters.adapter_path(self.spec).partition(":")[0]
        parts = (part for part in self.implementation.parts.values() if isinstance(part, str))
        return [adapter, *(part.partition(":")[0] for part in parts)]


def call_case_function(
    rank: int,
    world_size: int,
    subject: tuple[str, str | None],
    area: str,
    function: tuple[str, str, str],
    *args: Any,
) -> Any:
    """Call `function(part, rank, world_size, *args)` of a case on one rank."""
    part = Subject(*subject).part(area)
    return find_function(*function)(part, rank, world_size, *args)


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
