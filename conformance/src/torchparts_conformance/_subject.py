"""The implementation under test in this process, optionally with a fault."""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torchparts_conformance import _adapters
from torchparts_conformance._implementation import Implementation
from torchparts_conformance.mutants import load_mutant

_COMPARISONS = ("torch.equal", "torch.allclose", "torch.testing.assert_close")


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


def guard() -> Callable[[], list[str]]:
    """Record the suite's functions and torch's comparisons before an adapter is imported.

    Returns:
        A function that names those that were replaced since.
    """
    before = _judges()
    return lambda: sorted(
        name for name, value in _judges().items() if before.get(name, value) != value
    )


def _judges() -> dict[str, tuple[int, int]]:
    """Identify the functions that decide outcomes, by object and by code."""
    found = {}
    for name, module in list(sys.modules.items()):
        if name.startswith("torchparts_conformance.") and not name.startswith(_ADAPTERS):
            for word, value in list(vars(module).items()):
                if isinstance(value, types.FunctionType):
                    found[f"{name}.{word}"] = id(value), id(value.__code__)
    for name in _COMPARISONS:
        module_name, _, word = name.rpartition(".")
        value = getattr(sys.modules[module_name], word)
        found[name] = id(value), id(getattr(value, "__code__", None))
    return found


_ADAPTERS = "torchparts_conformance.adapters"
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
