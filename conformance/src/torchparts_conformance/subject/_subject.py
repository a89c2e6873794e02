"""What is under test in this process: an implementation, and the fault put into it, if any.

A subject travels to worker processes as two strings, so that every rank builds the same one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torchparts_conformance.mutants import load_mutant
from torchparts_conformance.subject import _adapters
from torchparts_conformance.subject._protocol import Implementation


@dataclass(frozen=True)
class Subject:
    """An implementation by its `--impl` text, and the fault (`file.py::name`) put into it."""

    spec: str
    mutant: str | None = None

    @cached_property
    def implementation(self) -> Implementation:
        """Import the adapter once."""
        return _adapters.load_implementation(self.spec)

    def part(self, area: str) -> Any:
        """Give the object under test for an area.

        Raises:
            AdapterError: the part is not provided or cannot be imported.
        """
        part = _adapters.load_part(self.implementation, area)
        if self.mutant is None:
            return part
        mutant = load_mutant(self.mutant)
        return mutant.apply(part) if mutant.area == area else part
