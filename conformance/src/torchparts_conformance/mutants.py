"""Broken implementations, made from a working one, that prove the suite can fail.

A mutant is a function that takes the part of a working implementation and gives one with a fault;
it declares the requirements that fault breaks, and has to fail exactly those. What files of a
folder of mutants share lies in a folder below it, and they import it as siblings:
`from .faults.my_area import broken`.
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
from torchparts_conformance.requirements._areas import AREAS

__all__ = ["Mutant", "find_mutants", "load_mutant", "mutant", "overlay"]


class _Overlay:
    """An object that is another one, but for the names laid over it."""

    def __init__(self, part: Any, names: dict[str, Any]) -> None:
        vars(self).update(names)
        vars(self)["_part"] = part

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)

    def __dir__(self) -> Iterable[str]:
        return sorted({*dir(self._part), *vars(self)} - {"_part"})


def overlay(part: Any, **names: Any) -> Any:
    """Give the same part with some names replaced.

    Raises:
        AttributeError: a name does not exist on the part, so replacing it would break nothing.
    """
    for name in names:
        getattr(part, name)
    return _Overlay(part, names)


@dataclass(frozen=True)
class Mutant:
    """A fault: its function, the area it is put into, and the requirements it breaks."""

    function: Callable[[Any], Any]
    area: str
    kills: frozenset[str]

    @property
    def name(self) -> str:
        """Give the name of the function."""
        return self.function.__name__

    @property
    def text(self) -> str:
        """Give the first line of the function's docstring: what is broken."""
        return (self.function.__doc__ or "").strip().partition("\n")[0]

    def apply(self, part: Any) -> Any:
        """Put the fault into a part."""
        return self.function(part)


def mutant(*, area: str, kills: Iterable[str]) -> Callable[[Callable[[Any], Any]], Mutant]:
    """Declare a broken implementation.

    Args:
        area: the area whose part the function takes.
        kills: ids of exactly those requirements that must fail.
    Raises:
        RegistryError: the area is unknown, no id is given, or there is no docstring.
    """

    def declare(function: Callable[[Any], Any]) -> Mutant:
        declared = Mutant(function, area, frozenset(kills))
        if area not in AREAS or not declared.kills or not declared.text:
            raise RegistryError(
                f"mutant {function.__name__!r}: area {area!r}, kills {sorted(declared.kills)}, "
                "but it needs a known area, at least one id and a docstring that names the fault."
            )
        return declared

    return declare


def find_mutants(path: Path) -> list[Mutant]:
    """Give the mutants declared in a file, in order of appearance."""
    return [value for value in vars(_module(path)).values() if isinstance(value, Mutant)]


def load_mutant(spec: str) -> Mutant:
    """Give one mutant by `file.py::name`.

    Raises:
        RegistryError: the file has no mutant of this name.
    """
    path, _, name = spec.rpartition("::")
    found = vars(_module(Path(path))).get(name)
    if not isinstance(found, Mutant):
        raise RegistryError(f"mutant {spec!r} is not there, but must be declared in that file.")
    return found


def _module(path: Path) -> Any:
    return _import_file(path.resolve())


@functools.cache
def _import_file(path: Path) -> Any:
    name = f"{_package_of(path.parent)}.{path.stem}"
    specification = importlib.util.spec_from_file_location(name, path)
    if specification is None or specification.loader is None or not path.exists():
        raise RegistryError(
            f"mutants file {path.name!r} cannot be read, but must be a Python file."
        )
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module
    specification.loader.exec_module(module)
    return module


def _package_of(folder: Path) -> str:
    """Name of the package whose modules are a folder's files, so that they can share some."""
    name = f"torchparts_mutants_{hashlib.sha256(str(folder).encode()).hexdigest()[:12]}"
    package = sys.modules.setdefault(name, types.ModuleType(name))
    package.__path__ = [str(folder)]
    return name
