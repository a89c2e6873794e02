"""Torch: take the tensors out of call arguments, and put others in their place.

Tensors are found in tuples, lists, dicts, dataclasses and registered pytree nodes, at any
depth; everything else is passed on by reference. A container without a tensor is not copied.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ckpt_wrap._torch_compat import registered_node

_PLAIN = (int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size)


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """Where a tensor stood: its position in the list of tensors."""

    index: int


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """A container with a tensor somewhere inside: its parts, and how to build it again."""

    parts: list[Any]
    build: Callable[[list[Any]], Any]


def flatten(value: object, tensors: list[torch.Tensor]) -> Any:
    """Append the tensors of `value` to `tensors`; return a template to `fill` later."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return Slot(len(tensors) - 1)
    if isinstance(value, _PLAIN):
        return value
    parts = _parts(value)
    if parts is None:
        return value
    before = len(tensors)
    templates = [flatten(part, tensors) for part in parts[0]]
    return Node(templates, parts[1]) if len(tensors) > before else value


def fill(template: object, tensors: Sequence[torch.Tensor]) -> Any:
    """The value a template was made from, with these tensors in the places of its own."""
    if isinstance(template, Slot):
        return tensors[template.index]
    if isinstance(template, Node):
        return template.build([fill(part, tensors) for part in template.parts])
    return template


def _parts(value: Any) -> tuple[Sequence[Any], Callable[[list[Any]], Any]] | None:
    kind = type(value)
    if kind is tuple or kind is list:
        return value, kind
    if isinstance(value, dict):
        return list(value.values()), _dict_builder(value)
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        return [getattr(value, name) for name in names], _dataclass_builder(value, names)
    if isinstance(value, tuple):
        return value, (lambda new: kind(*new)) if hasattr(value, "_fields") else kind
    return registered_node(value)


# The shells below are copies without values: a template must not keep a tensor alive, or it
# could neither be offloaded nor freed.


def _dict_builder(value: dict[Any, Any]) -> Callable[[list[Any]], Any]:
    keys = tuple(value)
    if type(value) is dict:
        return lambda new: dict(zip(keys, new, strict=True))
    shell = _with_items(value, keys, [None] * len(keys))
    return lambda new: _with_items(shell, keys, new)


def _with_items(original: Any, keys: Sequence[Any], values: Sequence[Any]) -> Any:
    new = copy.copy(original)
    for key, value in zip(keys, values, strict=True):
        new[key] = value
    return new


def _dataclass_builder(value: Any, names: Sequence[str]) -> Callable[[list[Any]], Any]:
    shell = _with_fields(value, names, [None] * len(names))
    return lambda new: _with_fields(shell, names, new)


def _with_fields(original: Any, names: Sequence[str], values: Sequence[Any]) -> Any:
    new = copy.copy(original)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(new, name, value)
    return new
