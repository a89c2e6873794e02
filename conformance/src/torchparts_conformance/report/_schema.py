"""Checks a value against the part of JSON Schema that the suite's own schemas use."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

_TYPES: Mapping[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}


def violation(value: Any, schema: Mapping[str, Any], where: str = "report") -> str:
    """Say where and why a value breaks a schema, or give an empty string.

    Example:
        >>> violation({"a": 1}, {"type": "object", "required": ["b"]})
        "report: lacks ['b']"
    """
    for keyword, check in _CHECKS.items():
        if keyword in schema and (reason := check(value, schema[keyword])):
            return f"{where}: {reason}"
    return _inside(value, schema, where)


def _inside(value: Any, schema: Mapping[str, Any], where: str) -> str:
    if isinstance(value, list) and "items" in schema:
        inner = ((schema["items"], item, f"{where}[{i}]") for i, item in enumerate(value))
    elif isinstance(value, dict):
        inner = (
            (_property(schema, key), item, f"{where}.{key:.40}") for key, item in value.items()
        )
    else:
        return ""
    return next((text for sub, item, at in inner if (text := violation(item, sub, at))), "")


def _property(schema: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    known = schema.get("properties", {})
    if key in known:
        return known[key]
    rest = schema.get("additionalProperties", True)
    return rest if isinstance(rest, Mapping) else ({} if rest else {"enum": ()})


def _of_type(value: Any, wanted: str | list[str]) -> str:
    names = [wanted] if isinstance(wanted, str) else wanted
    allowed = tuple(kind for name in names for kind in _TYPES[name])
    if (isinstance(value, bool) and bool not in allowed) or not isinstance(value, allowed):
        return f"is {type(value).__name__}, but {' or '.join(names)} is needed"
    return ""


def _lacks(value: Any, required: list[str]) -> str:
    missing = [key for key in required if key not in value]
    return f"lacks {missing}" if missing else ""


def _at_most(value: Any, limit: int) -> str:
    return f"holds {len(value)}, but {limit} is the most" if _len(value) > limit else ""


def _at_least(value: Any, limit: int) -> str:
    return f"holds {len(value)}, but {limit} is the least" if -1 < _len(value) < limit else ""


def _len(value: Any) -> int:
    return len(value) if isinstance(value, (str, list, dict)) else -1


def _matches(value: Any, pattern: str) -> str:
    unfit = isinstance(value, str) and re.search(pattern.replace("$", r"\Z"), value) is None
    return f"is {value!r:.60}, but must match {pattern}" if unfit else ""


def _one_of(value: Any, allowed: list[Any]) -> str:
    return "" if value in allowed else f"is {value!r:.60}, but must be one of {list(allowed)}"


def _not_below(value: Any, limit: float) -> str:
    return f"is {value}, but {limit} is the least" if _is_number(value) and value < limit else ""


def _not_above(value: Any, limit: float) -> str:
    return f"is {value}, but {limit} is the most" if _is_number(value) and value > limit else ""


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))


_CHECKS: Mapping[str, Callable[[Any, Any], str]] = {
    "type": _of_type,
    "const": lambda value, wanted: _one_of(value, [wanted]),
    "enum": _one_of,
    "required": _lacks,
    "minLength": _at_least,
    "maxLength": _at_most,
    "minItems": _at_least,
    "maxItems": _at_most,
    "maxProperties": _at_most,
    "pattern": _matches,
    "minimum": _not_below,
    "maximum": _not_above,
}
