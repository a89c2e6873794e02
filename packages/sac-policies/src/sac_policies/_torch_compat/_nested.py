"""Shapes of nested tensors."""

from __future__ import annotations

import torch


def compared_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the shape that two runs of a function must share.

    A nested tensor in the strided layout has no size in a dimension where its parts differ: -1.
    A jagged shape stays symbolic: jagged tensors with different offsets do not match.
    """
    if not (tensor.is_nested and tensor.layout is torch.strided):
        return tensor.shape
    return tuple(_size(tensor, dim) for dim in range(tensor.dim()))


def _size(tensor: torch.Tensor, dim: int) -> int:
    try:
        return tensor.size(dim)
    except RuntimeError:
        return -1
