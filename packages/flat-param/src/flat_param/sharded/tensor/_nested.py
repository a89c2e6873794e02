"""Find, cast and hook the tensors in the inputs and outputs of a module."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..._torch_compat import is_view


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested tuples, lists, mappings and dataclasses.

    Example:
        >>> [t.numel() for t in tensors_in((torch.ones(1), {"a": [torch.ones(2), "text"]}))]
        [1, 2]
    """
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for item in dataclasses.fields(value):
            yield from tensors_in(getattr(value, item.name))


def producers(tensor: Tensor) -> list[Any]:
    """Return the nodes that run in backward when a gradient of `tensor` arrives.

    An in-place operation on a view replaces the view's node, but not its base's.
    """
    node = tensor.grad_fn
    if node is None:
        return []
    behind = [next_node for next_node, _ in node.next_functions if next_node is not None]
    return [node, *behind] if is_view(tensor) else [node]


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


def cast_floats(value: Any, dtype: torch.dtype | None) -> Any:
    """Cast every floating-point tensor in the value to `dtype`; None casts nothing."""
    if dtype is None:
        return value
    return map_tensors(value, lambda t: t.to(dtype) if t.is_floating_point() else t)


def hook_nodes(tensors: Iterable[Tensor], told: Callable[[object], None]) -> bool:
    """Place a hook on the autograd node of each tensor; return whether there was a node."""
    nodes = [node for tensor in tensors for node in producers(tensor)]
    for node in nodes:
        node.register_prehook(told)
    return bool(nodes)
