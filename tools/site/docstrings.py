"""How the site reads docstrings: `Example:` is code, and no entry names what has none.

Its parser calls that section `Examples:`. Rules that a docstring refers to are in its file, and
left out. A name that a package does not export would be one without an entry: a base is left out,
an alias of types or a constant is what it stands for, a private default is an ellipsis, and a
parameter or a method for the package alone is not shown.
"""

from __future__ import annotations

import copy
import dataclasses
import re
import sys
from pathlib import Path
from typing import Any

import griffe

sys.path.insert(0, str(Path(__file__).resolve().parent))
import pages


class ForReaders(griffe.Extension):
    """Rename the section and leave out the rules while the source is read."""

    def on_object(self, *, obj: griffe.Object, **rest: Any) -> None:
        """Called for everything that has a docstring."""
        if obj.docstring is not None:
            text = pages.RULES.sub("", obj.docstring.value)
            obj.docstring.value = re.sub(
                r"^(\s*)Example:$", r"\1Examples:", text, flags=re.MULTILINE
            )


class PublicBases(griffe.Extension):
    """Leave out bases that the package keeps to itself."""

    def on_class(self, *, cls: griffe.Class, **rest: Any) -> None:
        """Called for every class."""
        package = cls.path.partition(".")[0]
        if package in pages.SOURCES:
            cls.bases = [base for base in cls.bases if not self._is_private(base, package)]

    def _is_private(self, base: Any, package: str) -> bool:
        path = getattr(base, "canonical_path", str(base))
        name = path.rpartition(".")[2]
        return path.startswith(f"{package}.") and name not in _last_parts(package)


class PublicTypes(griffe.Extension):
    """Replace or leave out the names of a package that it keeps to itself."""

    def on_package(self, *, pkg: griffe.Module, **rest: Any) -> None:
        """Called when a package has been read."""
        if pkg.path in pages.SOURCES:
            for name in pages.public_names(pkg.path):
                shown = pkg[name]
                shown = shown.final_target if isinstance(shown, griffe.Alias) else shown
                for member in (shown, *(shown.members.values() if shown.is_class else ())):
                    if not isinstance(member, griffe.Alias):
                        _show(member, pkg)


def _show(member: Any, pkg: griffe.Module) -> None:
    """Give one function or attribute the types that a reader can look up."""
    if isinstance(member, griffe.Attribute):
        member.annotation = _public(member.annotation, pkg)
        member.value = _public(member.value, pkg)
    elif isinstance(member, griffe.Function):
        taken = list(member.parameters)
        inner = [one for one in taken if one.name.startswith("_") or _is_inner(one.annotation, pkg)]
        if inner and member.name != "__init__":
            member.parent.del_member(member.name)  # called by the package itself
            return
        for parameter in inner:
            del member.parameters[parameter.name]
        for parameter in member.parameters:
            parameter.annotation = _public(parameter.annotation, pkg)
            parameter.default = _public(parameter.default, pkg)
        member.returns = _public(member.returns, pkg)


def _public(part: Any, pkg: griffe.Module) -> Any:
    """An expression with each private alias or constant as what it stands for."""
    if isinstance(part, griffe.ExprName):
        found = _private(part, pkg)
        if found is None or found.name.startswith("_"):
            return "..." if found else part
        if isinstance(found, griffe.Attribute) and "TypeVar" not in str(found.value):
            return _public(found.value, pkg)
        return next((b for b in getattr(found, "bases", ()) if _has_entry(b, pkg)), part)
    if isinstance(part, griffe.Expr):
        part = copy.copy(part)
        for field in dataclasses.fields(part):
            setattr(part, field.name, _public(getattr(part, field.name), pkg))
    return [_public(one, pkg) for one in part] if isinstance(part, list) else part


def _private(name: griffe.ExprName, pkg: griffe.Module) -> Any:
    """What an unexported name of this package stands for, where a file of it says so."""
    path = name.canonical_path
    if not path.startswith(f"{pkg.path}.") or _has_entry(name, pkg):
        return None
    try:
        found = pkg[path.removeprefix(f"{pkg.path}.")]
    except KeyError:  # of a local scope
        return None
    found = found.final_target if isinstance(found, griffe.Alias) else found
    return found if found.parent is not None and found.parent.is_module else None


def _is_inner(annotation: Any, pkg: griffe.Module) -> bool:
    """Whether only the package can make such an argument."""
    return isinstance(annotation, griffe.ExprName) and isinstance(
        _private(annotation, pkg), griffe.Class
    )


def _has_entry(name: Any, pkg: griffe.Module) -> bool:
    return str(name).rpartition(".")[2] in _last_parts(pkg.path)


def _last_parts(package: str) -> set[str]:
    return {name.rpartition(".")[2] for name in pages.public_names(package)}
