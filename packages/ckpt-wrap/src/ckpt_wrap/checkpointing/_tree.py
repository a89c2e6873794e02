"""Take the tensors out of call arguments, and put others in their place.

Tensors are found in tuples, lists, dicts, dataclasses and registered pytree nodes, at any
depth; everything else is passed on by reference. A container without a tensor is not copied, but
like any other object that can change it is for `_objects` to give again as it was.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ckpt_wrap._torch_compat import registered_node
from ckpt_wrap.checkpointing._object_state import is_followed

_PLAIN = frozenset(
    {int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size}
)

_CONTAINERS = (tuple, list, dict)


@dataclasses.dataclass(frozen=True, slots=True)
class TensorIndex:
    """Where a tensor stood: its position in the list of tensors."""

    index: int


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """A container with a tensor somewhere inside: its parts, and how to build it again."""

    parts: list[Any]
    build: Callable[[list[Any]], Any]


@dataclasses.dataclass(frozen=True, slots=True)
class ObjectIndex:
    """Where an object stood: its position among the objects."""

    index: int


def flatten(
    value: object,
    tensors: list[torch.Tensor],
    refer: Callable[[Any], int] | None = None,
) -> Any:
    """Append the tensors of `value` to `tensors`; return a template to `fill` later.

    Args:
        value: anything.
        tensors: gets the tensors.
        refer: gets each object that can change, and says its position among the objects; without
            it they are part of the template.
    """
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return TensorIndex(len(tensors) - 1)
    if type(value) in _PLAIN:  # an instance of a subclass may have attributes that change
        return value
    parts = _parts(value)
    if refer is not None and is_followed(type(value)):
        return _of_object(value, parts, tensors, refer)
    if parts is None:
        return value
    before = len(tensors)
    templates = [flatten(part, tensors, refer) for part in parts[0]]
    return Node(templates, parts[1]()) if len(tensors) > before else value


def _of_object(
    value: Any, parts: Parts | None, tensors: list[torch.Tensor], refer: Callable[[Any], int]
) -> Any:
    """The template of a container or instance: rebuilt if it has tensors, else by reference."""
    # A registered class whose instances can change is taken whole, or what a forward adds to one
    # would be seen by its second run.
    if parts is None or not (dataclasses.is_dataclass(value) or isinstance(value, _CONTAINERS)):
        return ObjectIndex(refer(value))
    inner: list[Any] = []

    def place(part: Any) -> int:
        inner.append(part)
        return refer(part)

    before = len(tensors)
    templates = [flatten(part, tensors, place) for part in parts[0]]
    if len(tensors) > before:
        return Node(templates, parts[1]())
    return value if isinstance(value, tuple) and not inner else ObjectIndex(refer(value))


def fill(template: object, tensors: Sequence[torch.Tensor], objects: Sequence[Any] = ()) -> Any:
    """The value a template was made from, with these tensors and objects in place of its own."""
    if isinstance(template, TensorIndex):
        return tensors[template.index]
    if isinstance(template, ObjectIndex):
        return objects[template.index]
    if isinstance(template, Node):
        return template.build([fill(part, tensors, objects) for part in template.parts])
    return template


# The parts of a container, and what makes what builds it again from others: made only if need be,
# as it may copy the container.
Parts = tuple[Sequence[Any], Callable[[], Callable[[list[Any]], Any]]]


def _parts(value: Any) -> Parts | None:
    kind = type(value)
    if kind is tuple or kind is list:
        return value, lambda: kind
    if isinstance(value, dict):
        return list(value.values()), partial(_dict_builder, value)
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        return [getattr(value, name) for name in names], partial(_dataclass_builder, value, names)
    if isinstance(value, tuple):
        return value, lambda: (lambda new: kind(*new)) if hasattr(value, "_fields") else kind
    node = registered_node(value)
    return None if node is None else (node[0], lambda: node[1])


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
