"""Adapt docstrings for the site: `Example:` is code, and private names are resolved.

The site's parser calls that section `Examples:`. Names that a package does not export have no entry
on the site: a private base class is left out, a private type alias or constant is replaced by its
value, a private default by an ellipsis, and parameters and methods for internal use are not shown.
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
    """Renames the section."""

    def on_object(self, *, obj: griffe.Object, **rest: Any) -> None:
        """Called for each object with a docstring."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(
                r"^(\s*)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE
            )


class PublicBases(griffe.Extension):
    """Removes private base classes."""

    def on_class(self, *, cls: griffe.Class, **rest: Any) -> None:
        """Called for each class."""
        package = cls.path.partition(".")[0]
        if package in pages.SOURCES:
            cls.bases = [base for base in cls.bases if not self._is_private(base, package)]

    def _is_private(self, base: Any, package: str) -> bool:
        path = getattr(base, "canonical_path", str(base))
        name = path.rpartition(".")[2]
        return path.startswith(f"{package}.") and name not in _last_parts(package)


class PublicTypes(griffe.Extension):
    """Replaces or removes private names in signatures."""

    def on_package(self, *, pkg: griffe.Module, **rest: Any) -> None:
        """Called when a package has been read."""
        if pkg.path in pages.SOURCES:
            for name in pages.public_names(pkg.path):
                shown = pkg[name]
                shown = shown.final_target if isinstance(shown, griffe.Alias) else shown
                _show_options(shown, pkg)
                for member in (shown, *(shown.members.values() if shown.is_class else ())):
                    if not isinstance(member, griffe.Alias):
                        _show(member, pkg)


def _show_options(function: Any, pkg: griffe.Module) -> None:
    """Give a function the parameters that its decorator, such as `@in_place_with(Class)`, adds."""
    for decorator in getattr(function, "decorators", ()):
        call = decorator.value
        if isinstance(call, griffe.ExprCall) and call.function.name.endswith("_with"):
            path = call.arguments[0].canonical_path.removeprefix(f"{pkg.path}.")
            _own, _by, *options = pkg[path]["__init__"].parameters
            function.parameters = griffe.Parameters(next(iter(function.parameters)), *options)


def _show(member: Any, pkg: griffe.Module) -> None:
    """Give one function or attribute public types."""
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
    """Return an expression with private aliases and constants replaced."""
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
    """Return the value of a private name of this package, if a file defines it."""
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
    """Whether only the package itself can pass such an argument."""
    return isinstance(annotation, griffe.ExprName) and isinstance(
        _private(annotation, pkg), griffe.Class
    )


def _has_entry(name: Any, pkg: griffe.Module) -> bool:
    return str(name).rpartition(".")[2] in _last_parts(pkg.path)


def _last_parts(package: str) -> set[str]:
    return {name.rpartition(".")[2] for name in pages.public_names(package)}
