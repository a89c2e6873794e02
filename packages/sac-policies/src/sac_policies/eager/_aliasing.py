"""Versions, storages and copies of tensors, as the tape uses them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

UNVERSIONED = -1
"""Version of an inference tensor: it has no counter."""


def version_of(tensor: torch.Tensor) -> int:
    """Return a tensor's version; UNVERSIONED for an inference tensor.

    Example:
        >>> version_of(torch.zeros(2).add_(1))
        1
    """
    try:
        return tensor._version
    except RuntimeError:
        return UNVERSIONED


def storage_of(tensor: torch.Tensor) -> int | None:
    """Return a key of a tensor's storage; None without one."""
    try:
        return tensor.untyped_storage()._cdata
    except NotImplementedError:
        return None


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill a stretch of memory, in some order of the dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor with its strides and overlaps."""
    is_plain = tensor.layout is torch.strided and not tensor.is_nested and tensor.numel()
    if not is_plain or tensor.is_contiguous():
        return tensor.clone()
    sizes, strides = tensor.size(), tensor.stride()
    span = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    flat = torch.as_strided(tensor, (span,), (1,)).clone()
    return torch.as_strided(flat, sizes, strides, 0)


def tensors_among(values: Iterable[Any]) -> list[torch.Tensor]:
    """List the tensors in an operator's arguments, also those in lists."""
    found: list[torch.Tensor] = []
    for value in values:
        for each in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(each, torch.Tensor):
                found.append(each)
    return found
