"""What a Python function refers to: closures, defaults, and globals that it names."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

MISSING = object()
"""The content of a cell that is not yet assigned."""


def reads(function: FunctionType) -> list[Any]:
    """Return the values that a function refers to."""
    cells = [content(each) for each in function.__closure__ or ()]
    return [*defaults(function), *cells, *named_globals(function).values()]


def named_by(function: Any) -> list[Any]:
    """Return the values that a callable of the user refers to, without modules and classes.

    Example:
        >>> named_by([3].append)
        [[3]]
    """
    while isinstance(function, partial):
        function = function.func
    own = getattr(function, "__self__", None)
    plain = getattr(function, "__func__", function)
    found = reads(plain) if isinstance(plain, FunctionType) else []
    found += [] if own is None else [own]
    return [each for each in found if not isinstance(each, (type, ModuleType))]


def defaults(function: FunctionType) -> list[Any]:
    """Return the default values of its arguments."""
    return [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]


def named_globals(function: FunctionType) -> dict[str, Any]:
    """Return the globals that its code names, also in functions that it defines."""
    found = function.__globals__
    return {name: found[name] for name in set(_names(function.__code__)) if name in found}


def content(cell: CellType) -> Any:
    """Return a cell's content, or `MISSING`."""
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _names(each)
