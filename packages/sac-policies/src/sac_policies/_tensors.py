"""Finds tensors in nested containers: arguments, results, batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ._torch_compat import tree_leaves


def tensors_in(value: Any) -> list[torch.Tensor]:
    """List the tensors in nested containers, in order.

    Containers are what pytree knows, and any other dict, list or tuple; one of those that holds
    itself is not entered again.

    Example:
        >>> class Batch(dict): ...
        >>> [tensor.numel() for tensor in tensors_in([Batch(x=torch.ones(2)), torch.ones(3)])]
        [2, 3]
    """
    return list(_tensors(value, set()))


def _tensors(value: Any, around: set[int]) -> Iterator[torch.Tensor]:
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif isinstance(leaf, (dict, list, tuple)) and id(leaf) not in around:
            around.add(id(leaf))
            yield from _tensors(tuple(leaf.values() if isinstance(leaf, dict) else leaf), around)
            around.discard(id(leaf))


def needing_gradients(value: Any) -> tuple[bool, ...]:
    """Tell of each tensor in nested containers whether it needs a gradient, in order."""
    return tuple(tensor.requires_grad for tensor in tensors_in(value))
