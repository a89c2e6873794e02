"""Broken implementations, made from a working one, to show that the cases can fail.

A mutant is a function that takes the part of a working implementation and returns one with a fault.
It declares the requirements that must fail. Files of a folder of mutants may share code in a
subfolder: `from .faults.my_area import broken`.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import sys
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchparts_conformance._errors import RegistryError
from torchparts_conformance.requirements._requirement import area_of_id

__all__ = ["Mutant", "find_mutants", "load_mutant", "mutant", "overlay"]


class _Overlay:
    """A proxy of an object with some names replaced."""

    def __init__(self, part: Any, names: dict[str, Any]) -> None:
        vars(self).update(names)
        vars(self)["_part"] = part

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)

    def __dir__(self) -> Iterable[str]:
        return sorted({*dir(self._part), *vars(self)} - {"_part"})


def overlay(part: Any, **names: Any) -> Any:
    """Return a part with some names replaced.

    Raises:
        AttributeError: the part does not have a name, so replacing it would break nothing.
    """
    for name in names:
        getattr(part, name)
    return _Overlay(part, names)


@dataclass(frozen=True)
class Mutant:
    """A fault: its function, and the requirements of one area that must fail."""

    function: Callable[[Any], Any]
    kills: frozenset[str]

    @property
    def area(self) -> str:
        """The area whose part the function takes."""
        return area_of_id(min(self.kills))

    @property
    def name(self) -> str:
        """The name of the function."""
        return self.function.__name__

    @property
    def text(self) -> str:
        """The first line of the function's docstring."""
        return (self.function.__doc__ or "").strip().partition("\n")[0]

    def apply(self, part: Any) -> Any:
        """Return the part with the fault."""
        return self.function(part)


def mutant(kills: str) -> Callable[[Callable[[Any], Any]], Mutant]:
    """Declare a broken implementation; the function takes the part of the ids' area.

    Args:
        kills: ids of exactly those requirements that must fail, separated by spaces.
    Raises:
        RegistryError: no id is given, ids are of several areas, or the docstring is missing.
    """

    def declare(function: Callable[[Any], Any]) -> Mutant:
        declared = Mutant(function, frozenset(kills.split()))
        if len({area_of_id(id) for id in declared.kills}) != 1 or not declared.text:
            raise RegistryError(
                f"mutant {function.__name__!r}: kills {kills!r}. It needs ids of one area, and a "
                "docstring that names the fault."
            )
        return declared

    return declare


def find_mutants(path: Path) -> list[Mutant]:
    """Return the mutants declared in a file, in order of appearance."""
    return [value for value in vars(_import(path.resolve())).values() if isinstance(value, Mutant)]


def load_mutant(spec: str) -> Mutant:
    """Return one mutant by `file.py::name`.

    Raises:
        RegistryError: the file has no mutant of this name.
    """
    path, _, name = spec.rpartition("::")
    found = vars(_import(Path(path).resolve())).get(name)
    if not isinstance(found, Mutant):
        raise RegistryError(f"mutant {spec!r}: the file declares no such mutant.")
    return found


@functools.cache
def _import(path: Path) -> Any:
    name = f"{_package_of(path.parent)}.{path.stem}"
    specification = importlib.util.spec_from_file_location(name, path)
    if specification is None or specification.loader is None or not path.exists():
        raise RegistryError(f"mutants file {path.name!r} is not a Python file.")
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module
    specification.loader.exec_module(module)
    return module


def _package_of(folder: Path) -> str:
    """Make the files of a folder modules of one package, so that they can share code."""
    name = f"torchparts_mutants_{hashlib.sha256(str(folder).encode()).hexdigest()[:12]}"
    package = sys.modules.setdefault(name, types.ModuleType(name))
    package.__path__ = [str(folder)]
    return name
