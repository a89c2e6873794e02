"""Find and change the tensors in nested values, such as inputs and outputs of a module."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor


def tensors_in(value: Any) -> list[Tensor]:
    """Every tensor in nested tuples, lists, mappings and dataclasses.

    Example:
        >>> [t.numel() for t in tensors_in((torch.ones(1), {"a": [torch.ones(2), "text"]}))]
        [1, 2]
    """
    items: Iterable[Any] = ()
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        items = value
    elif isinstance(value, Mapping):
        items = value.values()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = [getattr(value, item.name) for item in dataclasses.fields(value)]
    found: list[Tensor] = []
    for item in items:
        if isinstance(item, Tensor):
            found.append(item)
        else:
            found += tensors_in(item)
    return found


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return the same tuples, lists, dicts and dataclasses with every tensor mapped."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        made = {} if type(value) is dict else copy.copy(value)  # with its class and attributes
        for key, item in value.items():
            made[key] = map_tensors(item, change)
        return made
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*[map_tensors(item, change) for item in value])
    if isinstance(value, (tuple, list)):
        return type(value)([map_tensors(item, change) for item in value])
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        found = copy.copy(value)  # runs no `__init__`
        for item in dataclasses.fields(value):
            new = map_tensors(getattr(value, item.name), change)
            object.__setattr__(found, item.name, new)  # it may be frozen
        return found
    return value


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Cast every floating-point tensor in the value to `dtype`."""
    return map_tensors(value, lambda t: t.to(dtype) if t.is_floating_point() else t)
