"""Shapes of nested tensors.

A dimension in which the parts differ has no size in the strided layout, and a symbolic one in the
jagged layout.
"""

from __future__ import annotations

import torch

RAGGED = -1
"""Size of a dimension in which the parts differ."""


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of a tensor, with RAGGED where the parts of a nested one differ."""
    if not tensor.is_nested:
        return tuple(tensor.shape)
    return tuple(_size(tensor, dim) for dim in range(tensor.dim()))


def _size(tensor: torch.Tensor, dim: int) -> int:
    try:
        size = tensor.size(dim)
    except RuntimeError:  # it has no shape
        return RAGGED
    return size if type(size) is int else RAGGED


def compared_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the shape that two runs of a function must share.

    A jagged shape stays symbolic: jagged tensors with different offsets do not match.
    """
    has_none = tensor.is_nested and tensor.layout is torch.strided
    return shape_of(tensor) if has_none else tensor.shape
