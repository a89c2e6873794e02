"""Notices when code under test has replaced what judges it.

An implementation runs in the process that judges it, so it can put its own function in the place of
one of torch's comparisons, of pytest, of the standard library's or of the suite, and its own plugin
among pytest's. What is in such a place when somebody looks is found here; what was put back before
that is not.

Rule 1: what was there is held by a closure and in tuples: no class, attribute or dictionary that
other code could write to decides what is found.
Rule 2: things are compared by identity: what replaces something may say that it equals it.
"""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from operator import attrgetter, is_, itemgetter
from typing import Any

_JUDGES = (
    *("torchparts_conformance", "_pytest", "pytest", "pluggy", "builtins", "math", "hashlib"),
    *("json", "os", "posix", "io", "time", "signal", "faulthandler"),
)
_COMPARISONS = ("torch", "torch.Tensor", "torch.testing", "torch.testing._comparison")
_COMPARED_BY = ("allclose", "assert_close", "equal", "isclose", "is_tensor", "item", "tolist")
# Pytest puts something else there for every case; it words failures, and decides nothing.
_CHANGING = ("_reprcompare", "_assertion_pass")
_MISSING = object()
Look = Callable[[], list[str]]
_Place = tuple[str, Mapping[str, Any], tuple[str, ...]]


def guard(plugins: Any = None) -> Look:
    """Remember what judges; gives a function that names what is not what it was.

    Args:
        plugins: pytest's plugin manager, where there is one.
    """
    # What is not imported yet cannot be seen to be replaced.
    import_module("pytest")
    places = tuple((*place, _values(place)) for place in _places())
    owners = tuple(_comparisons(import_module("torch")))
    functions = tuple(_functions(places))
    codes = tuple(map(_code, (function for _, function in functions)))
    hooks = tuple(_hooks(plugins)) if plugins is not None else ()
    tracers = _tracers()

    def replaced() -> list[str]:
        """Name what is not what it was."""
        found = [
            f"{name}.{word}"
            for name, where, words, values in places
            if not _same(_values((name, where, words)), values)
            for word, value in zip(words, values, strict=True)
            if where.get(word, _MISSING) is not value
        ]
        found += [
            f"{name}.{word}"
            for name, owner, words, values in owners
            for word, value in zip(words, values, strict=True)
            if getattr(owner, word, _MISSING) is not value
        ]
        found += [
            name
            for (name, function), code in zip(functions, codes, strict=True)
            if function.__code__ is not code
        ]
        found += [f"pytest's hook {n}" for n, hook, were in hooks if not _same(_calls(hook), were)]
        return found if _same(_tracers(), tracers) else [*found, "the trace function"]

    return replaced


_code = attrgetter("__code__")


def _same(found: tuple[Any, ...], were: tuple[Any, ...]) -> bool:
    return len(found) == len(were) and all(map(is_, found, were))


def _values(place: _Place) -> tuple[Any, ...]:
    """Give what is under some words of a module or class, and nothing if one is gone."""
    _, where, words = place
    try:
        found = itemgetter(*words)(where)
    except KeyError:
        return ()
    return found if len(words) > 1 else (found,)


def _places() -> Iterator[_Place]:
    judges = {n: m for n, m in sorted(sys.modules.items()) if n.partition(".")[0] in _JUDGES}
    yield "sys.modules", sys.modules, tuple(judges)
    for name, module in judges.items():
        yield from _places_in(name, module)


def _comparisons(
    torch: types.ModuleType,
) -> Iterator[tuple[str, Any, tuple[str, ...], tuple[Any, ...]]]:
    """Give what compares tensors, as it is found: in a class, or in one above it."""
    for place in _COMPARISONS:
        owner = torch.Tensor if place == "torch.Tensor" else sys.modules[place]
        words = tuple(word for word in _COMPARED_BY if hasattr(owner, word))
        yield place, owner, words, tuple(getattr(owner, word) for word in words)


def _places_in(name: str, module: types.ModuleType) -> Iterator[_Place]:
    """Give the functions of a module, and the methods of the classes it defines."""
    names = vars(module)
    if words := tuple(word for word, value in list(names.items()) if _stays(word, value)):
        yield name, names, words
    for word, value in list(names.items()):
        if isinstance(value, type) and value.__module__ == name:
            inside = vars(value)
            if methods := tuple(m for m, inner in list(inside.items()) if _is_method(inner)):
                yield f"{name}.{word}", inside, methods


def _stays(word: str, value: Any) -> bool:
    return callable(value) and word not in _CHANGING


def _is_method(value: Any) -> bool:
    return callable(value) or isinstance(value, (classmethod, staticmethod, property))


def _functions(
    places: Iterable[tuple[str, Mapping[str, Any], tuple[str, ...], tuple[Any, ...]]],
) -> Iterator[tuple[str, types.FunctionType]]:
    """Give each function once, with where it is defined; its code can be replaced as well."""
    found: dict[types.FunctionType, None] = {}
    for *_, values in places:
        for value in values:
            found.update(dict.fromkeys(_inside(value)))
    return ((f"{function.__module__}.{function.__qualname__}", function) for function in found)


def _inside(value: Any) -> Iterator[types.FunctionType]:
    """Give the functions behind a function, a method or a property."""
    parts = (value, *(getattr(value, word, None) for word in ("__func__", "fget", "__wrapped__")))
    yield from (part for part in parts if isinstance(part, types.FunctionType))


def _hooks(plugins: Any) -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    for name, hook in sorted(vars(plugins.hook).items()):
        if hasattr(hook, "get_hookimpls"):
            yield name, hook, _calls(hook)


def _calls(hook: Any) -> tuple[Any, ...]:
    """Give the functions that a hook calls, in their order, and what calls them."""
    implementations: Iterable[Any] = hook.get_hookimpls()
    return *(found.function for found in implementations), getattr(hook, "_hookexec", None)


def _tracers() -> tuple[Any, ...]:
    """Give what sees every call and line, and could change what it sees."""
    monitoring = getattr(sys, "monitoring", None)
    tools = map(monitoring.get_tool, range(6)) if monitoring is not None else ()
    names = (None if tool is None else sys.intern(str(tool)) for tool in tools)
    return sys.gettrace(), sys.getprofile(), threading.gettrace(), threading.getprofile(), *names
