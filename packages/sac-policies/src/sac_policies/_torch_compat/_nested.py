"""Nested tensors: the shape of what has none.

A dimension in which the parts differ has no size where the layout is strided, and one of its own,
which is no number, where it is jagged.
"""

from __future__ import annotations

import torch

RAGGED = -1
"""Stands for the size of a dimension in which the parts differ."""


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of a tensor, with RAGGED where the parts of a nested one differ."""
    if not tensor.is_nested:
        return tuple(tensor.shape)
    return tuple(_size(tensor, dim) for dim in range(tensor.dim()))


def _size(tensor: torch.Tensor, dim: int) -> int:
    try:
        size = tensor.size(dim)
    except RuntimeError:  # it has none
        return RAGGED
    return size if type(size) is int else RAGGED


def compared_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return what two runs of a function have in common of a shape.

    Jagged tensors with other offsets do not go together, so theirs stays as it is.
    """
    has_none = tensor.is_nested and tensor.layout is torch.strided
    return shape_of(tensor) if has_none else tensor.shape
