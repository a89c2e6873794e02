"""Finds tensors in nested containers: arguments, results, batches; facts about them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ._torch_compat import tree_leaves

_CONTAINERS = frozenset({tuple, list, dict})
_NO_TENSORS = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device})


def tensors_in(value: Any) -> list[torch.Tensor]:
    """List the tensors in nested containers, in order.

    Containers are those that pytree knows, and any other dict, list or tuple. Cycles are followed
    once.

    Example:
        >>> class Batch(dict): ...
        >>> [tensor.numel() for tensor in tensors_in([Batch(x=torch.ones(2)), torch.ones(3)])]
        [2, 3]
    """
    found: list[torch.Tensor] = []
    return found if _are_plain((value,), found, 4) else list(_tensors(value, set()))


def _are_plain(values: Iterable[Any], found: list[torch.Tensor], depth: int) -> bool:
    """Collect tensors in tuples, lists and dicts of plain values; False for other types."""
    for value in values:
        kind = type(value)
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            found.append(value)
        elif kind in _CONTAINERS and depth:
            inside = value.values() if kind is dict else value
            if value and not _are_plain(inside, found, depth - 1):
                return False
        elif kind not in _NO_TENSORS:
            return False
    return True


def _tensors(value: Any, around: set[int]) -> Iterator[torch.Tensor]:
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif isinstance(leaf, (dict, list, tuple)) and id(leaf) not in around:
            around.add(id(leaf))
            yield from _tensors(tuple(leaf.values() if isinstance(leaf, dict) else leaf), around)
            around.discard(id(leaf))


def is_accelerator(device: torch.device) -> bool:
    """Whether a device has its own streams, memory and random numbers."""
    return device.type not in ("cpu", "meta")
