"""Checks of values from users and from JSON."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from .._errors import PolicyError, shown

_MAX_COUNT = 2**63 - 1


def is_count(value: object) -> bool:
    """Whether `value` is an int from 0 that fits in 64 bits.

    Example:
        >>> is_count(3), is_count(True), is_count(-1), is_count(2**64)
        (True, False, False, False)
    """
    return type(value) is int and 0 <= value <= _MAX_COUNT


def check_texts(texts: tuple[object, ...], what: str, *, where: str) -> None:
    """Refuse an empty list, and entries that are not text.

    Raises:
        PolicyError: with the entry.
    """
    if not texts:
        raise PolicyError(
            f"sac_policies.{where}: no {what} is given, but at least one is needed. "
            "Use recompute_all() to keep nothing."
        )
    for text in texts:
        if not (isinstance(text, str) and text):
            hint = "Write for example 'attn'."
            if isinstance(text, (list, tuple, set)):
                hint = f"Pass each as an argument of its own: {where}(*names)."
            raise PolicyError(
                f"sac_policies.{where}: {what} {shown(text)} is a {type(text).__name__}, but a "
                f"{what} is text that is not empty. {hint}"
            )


def field_problem(kind: type, given: dict[str, Any]) -> str:
    """Return which value does not fit the field of a dataclass; "" if all fit.

    Args:
        kind: a dataclass; fields without comparison must not be given.
        given: field name to value.

    Example:
        >>> from sac_policies.policies import OpView
        >>> field_problem(OpView, {"op": None, "index": "0"})
        "index is '0'"
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
    """Whether `value` has the annotated type; True if the annotation cannot be checked.

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
    except TypeError:  # Any, list[int], a protocol: isinstance does not support these
        return True


def _items_conform(value: tuple[Any, ...], hints: tuple[Any, ...]) -> bool:
    if len(hints) == 2 and hints[1] is Ellipsis:
        return all(conforms(each, hints[0]) for each in value)
    return len(value) == len(hints) and all(map(conforms, value, hints))


@lru_cache
def _hints(kind: type) -> dict[str, Any]:
    try:
        return typing.get_type_hints(kind)
    except (NameError, TypeError, AttributeError):  # raised for names of a local scope
        return {}


def _is_required(field: dataclasses.Field[Any]) -> bool:
    no_default = field.default is dataclasses.MISSING
    return field.init and no_default and field.default_factory is dataclasses.MISSING
