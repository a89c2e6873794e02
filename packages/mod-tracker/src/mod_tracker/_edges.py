"""The tensors in a value, and the gradient edges of those that require a gradient.

The search runs no code of the values, which could raise an error that the model alone would not.
So containers are read by the methods of the built-in types, and tensor subclasses without their
`__torch_function__`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from typing import Any

from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from ._torch_compat import without_torch_function

Edge = tuple[Any, int]  # autograd node, index of its output

PLAIN = frozenset({type(None), bool, int, float, str})
"""The most frequent types of values that hold no tensor."""

CONTAINERS: dict[type, Callable[[Any], Iterable[Any]]] = {
    tuple: tuple.__iter__,
    list: list.__iter__,
    dict: dict.values,
    set: set.__iter__,
    frozenset: frozenset.__iter__,
}
"""Containers that are searched, and how to read them."""

MAX_NESTING = 8
"""Levels of nested containers that are searched for tensors."""


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in nested tuples, lists, sets, dicts and dataclasses."""
    found: list[Tensor] = []
    _collect((value,), found, MAX_NESTING)
    return found


def _collect(values: Iterable[Any], found: list[Tensor], levels: int) -> None:
    for value in values:
        kind = type(value)
        if issubclass(kind, Tensor):
            found.append(value)
        elif kind not in PLAIN and levels > 0:
            _collect(_parts(value, kind), found, levels - 1)


def _parts(value: Any, kind: type) -> Iterable[Any]:
    for container, read in CONTAINERS.items():
        if issubclass(kind, container):
            return read(value)
    if hasattr(kind, "__dataclass_fields__"):
        return [_read(value, item.name) for item in fields(kind)]
    return ()


def _read(value: Any, name: str) -> Any:
    try:
        return object.__getattribute__(value, name)
    except AttributeError:
        return None


def edges_of(values: Iterable[Any], leaves: dict[int, Edge] | None) -> Sequence[Edge]:
    """Return the gradient edges of the tensors in `values` that require a gradient, each once.

    Args:
        values: tensors, containers of tensors, or anything else.
        leaves: edges of leaf tensors found before, by `id` of the tensor. Finding a leaf's edge
            costs twenty times as much as another edge, and nested modules get the same leaf. The
            entries keep the tensors alive. None leaves leaf tensors out.
    """
    edges: dict[Edge, None] = {}
    for value in values:
        if type(value) is Tensor:
            _add_edge(value, edges, leaves)
        elif type(value) not in PLAIN:
            with without_torch_function():
                for tensor in tensors_in(value):
                    _add_edge(tensor, edges, leaves)
    return list(edges)


def _add_edge(tensor: Tensor, edges: dict[Edge, None], leaves: dict[int, Edge] | None) -> None:
    node = tensor.grad_fn
    if node is not None:
        edges[node, tensor.output_nr] = None
    elif leaves is not None and tensor.requires_grad:
        if id(tensor) not in leaves:
            found = get_gradient_edge(tensor)
            leaves[id(tensor)] = (found.node, found.output_nr)
        edges[leaves[id(tensor)]] = None
