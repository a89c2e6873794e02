"""Torch: the tensors in a value, and the gradient edges of those that require a gradient."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor
from torch.autograd.graph import get_gradient_edge

Edge = tuple[Any, int]  # autograd node, and which of its outputs

PLAIN = frozenset({type(None), bool, int, float, str})
"""Types of values that hold no tensor, by far the most frequent next to tensors."""

MAX_NESTING = 8
"""Containers inside containers that are searched for tensors."""


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in nested tuples, lists, sets, mappings and dataclasses."""
    found: list[Tensor] = []
    _collect((value,), found, MAX_NESTING)
    return found


def _collect(values: Iterable[Any], found: list[Tensor], levels: int) -> None:
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif type(value) in PLAIN or levels == 0:
            continue
        elif isinstance(value, (tuple, list, set, frozenset)):
            _collect(value, found, levels - 1)
        elif isinstance(value, Mapping):
            _collect(value.values(), found, levels - 1)
        elif is_dataclass(value):
            parts = [getattr(value, item.name, None) for item in fields(value)]
            _collect(parts, found, levels - 1)


def edges_of(values: Iterable[Any], leaves: dict[int, Edge]) -> Sequence[Edge]:
    """Return the gradient edges of the tensors in `values` that require a gradient, each once.

    Args:
        values: tensors, or containers of them, or anything else.
        leaves: edges of leaf tensors found before, by `id` of the tensor. A leaf's edge is twenty
            times as expensive as another's, and every module on the way in sees the same leaf.
            The entries keep the tensors alive.
    """
    edges: list[Edge] = []
    previous = None
    for value in values:
        if isinstance(value, Tensor):
            # Attention is given one tensor three times.
            if value.requires_grad and value is not previous:
                previous = value
                node = value.grad_fn
                edges.append(_leaf(value, leaves) if node is None else (node, value.output_nr))
        elif type(value) not in PLAIN:
            edges += edges_of(tensors_in(value), leaves)
    return edges if len(edges) < 2 else list(dict.fromkeys(edges))


def _leaf(tensor: Tensor, leaves: dict[int, Edge]) -> Edge:
    edge = leaves.get(id(tensor))
    if edge is None:
        found = get_gradient_edge(tensor)
        edge = leaves[id(tensor)] = (found.node, found.output_nr)
    return edge
