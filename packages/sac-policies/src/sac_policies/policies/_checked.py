"""Values from outside, held against the types and limits they are to have.

Rule 1. A policy is small: the limits below are far above what a model needs, and keep the time
        that a policy takes in proportion to its length.
Rule 2. What is read from text has the types that its dataclass declares, before it is used.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

from .._errors import shown

MAX_CHARACTERS = 1_000
"""Longest operator entry, module path, or tensor name of a policy, in characters."""
MAX_ENTRIES = 4_096
"""Most entries of one rule."""
MAX_DEPTH = 100
"""Most policies inside one another."""
MAX_RULES = 10_000
"""Most policies in one."""
_MAX_COUNT = 2**63 - 1


def is_count(value: object) -> bool:
    """Whether `value` is an int from 0 that fits in 64 bits.

    Example:
        >>> is_count(3), is_count(True), is_count(-1), is_count(2**64)
        (True, False, False, False)
    """
    return type(value) is int and 0 <= value <= _MAX_COUNT


def text_problem(texts: Iterable[object], what: str) -> str:
    """Say which of `texts` cannot be an entry of a policy, and why; "" where all can.

    Example:
        >>> text_problem(["attn", ""], "path")
        "path '' is a str, but a path is text that is not empty"
    """
    for number, text in enumerate(texts):
        if number >= MAX_ENTRIES:
            return f"one rule has more than {MAX_ENTRIES} of them, but that is the most"
        if not (isinstance(text, str) and text):
            return (
                f"{what} {shown(text)} is a {type(text).__name__}, but a {what} is text that is "
                "not empty"
            )
        if len(text) > MAX_CHARACTERS:
            return (
                f"{what} {shown(text)} has {len(text)} characters, but {MAX_CHARACTERS} are the "
                "most"
            )
    return ""


def field_problem(kind: type, given: dict[str, Any]) -> str:
    """Say which value is none that a dataclass declares for its field; "" where all are.

    Args:
        kind: a dataclass; fields left out of comparison are not to be given.
        given: field name to value.

    Example:
        >>> from sac_policies.budget import TracedPack
        >>> field_problem(TracedPack, {"producer": "", "made_by": "0"})
        "made_by is '0'"
    """
    declared = {each.name: each for each in dataclasses.fields(kind) if each.compare}
    for name in given:
        if name not in declared:
            return f"{kind.__name__} has no {shown(name)}"
    hints = _hints(kind)
    for name, value in given.items():
        if not conforms(value, hints.get(name, Any)):
            return f"{name} is {shown(value)}"
    missing = (each.name for each in declared.values() if _is_required(each))
    lacking = next((name for name in missing if name not in given), "")
    return f"{kind.__name__} lacks {lacking!r}" if lacking else ""


def conforms(value: Any, hint: Any) -> bool:
    """Whether `value` is of the type that an annotation spells; one that it cannot read is met.

    Example:
        >>> conforms(("a", 1), tuple[str, int]), conforms(True, int), conforms(None, int | None)
        (True, False, True)
    """
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(conforms(value, each) for each in inner)
    if origin is typing.Literal:
        return any(type(value) is type(each) and value == each for each in inner)
    if origin is tuple:
        return isinstance(value, tuple) and _items_conform(value, inner)
    if origin is Callable:
        return callable(value)
    if hint is int:
        return type(value) is int and abs(value) <= _MAX_COUNT
    if hint is float:
        return type(value) in (int, float) and math.isfinite(value)
    try:
        return isinstance(value, hint) if isinstance(hint, type) else True
    except TypeError:  # Any, list[int], a protocol: a type that cannot be asked
        return True


def _items_conform(value: tuple[Any, ...], hints: tuple[Any, ...]) -> bool:
    if len(hints) == 2 and hints[1] is Ellipsis:
        return all(conforms(each, hints[0]) for each in value)
    return len(value) == len(hints) and all(map(conforms, value, hints))


@lru_cache
def _hints(kind: type) -> dict[str, Any]:
    try:
        return typing.get_type_hints(kind)
    except (NameError, TypeError, AttributeError):  # names of a scope that is gone
        return {}


def _is_required(field: dataclasses.Field[Any]) -> bool:
    no_default = field.default is dataclasses.MISSING
    return field.init and no_default and field.default_factory is dataclasses.MISSING
