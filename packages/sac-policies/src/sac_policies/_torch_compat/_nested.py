"""Nested tensors: the shape of what has none, and how torch's checkpoint refuses them.

A dimension in which the parts differ has no size where the layout is strided, and one of its own,
which is no number, where it is jagged.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

RAGGED = -1
"""Stands for the size of a dimension in which the parts differ."""
_REFUSED = "NestedTensorImpl doesn't support sizes"


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


def any_nested(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether one of these tensors is nested."""
    return any(tensor.is_nested for tensor in tensors)


def asks_for_sizes(error: BaseException) -> bool:
    """Whether an error is of a strided nested tensor that was asked for its shape.

    Lost where torch words it otherwise: then torch's error is left as it is.
    """
    return isinstance(error, RuntimeError) and _REFUSED in str(error)
