"""Masks as bits: what dropout draws is held in an eighth of a byte for each element."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

LEAST_ELEMENTS = 1024
"""Smaller masks are held as they are."""


class _Unpack:
    """Makes a mask again from its bits; on the tape it is the operator of a call."""

    __slots__ = ("call", "op", "shares")

    def __init__(self, call: Callable[..., torch.Tensor]) -> None:
        self.op = "the bits of a mask"
        self.call = call
        self.shares = False


def takes(tensor: Any) -> bool:
    """Whether a tensor is stored as bits: large and contiguous, with memory of its own."""
    return (
        type(tensor) is torch.Tensor
        and tensor.numel() >= LEAST_ELEMENTS
        and tensor.is_contiguous()
        and not tensor.is_meta
    )


def packed(mask: torch.Tensor) -> torch.Tensor:
    """Pack a contiguous mask, of zeros and ones, into bytes: eight planes side by side.

    Example:
        >>> packed(torch.ones(16, dtype=torch.bool)).tolist()
        [255, 255]
    """
    flat = mask.reshape(-1)
    ones = (flat if flat.dtype is torch.bool else flat != 0).view(torch.uint8)
    if beyond := -ones.numel() % 8:
        ones = torch.nn.functional.pad(ones, (0, beyond))
    return (ones.view(8, -1) << _shifts(ones)).sum(0, dtype=torch.uint8)


def unpacked(bits: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return the mask that was packed.

    Example:
        >>> unpacked(packed(torch.tensor([True, False, True])), (3,), torch.bool).tolist()
        [True, False, True]
    """
    numel = 1
    for size in shape:
        numel *= size
    ones = (bits >> _shifts(bits)).bitwise_and_(1).view(-1)[:numel]
    flags = ones.view(torch.bool).view(shape)
    return flags if dtype is torch.bool else flags.to(dtype)


def _shifts(ones: torch.Tensor) -> torch.Tensor:
    return torch.arange(8, dtype=torch.uint8, device=ones.device).view(8, 1)


UNPACK = _Unpack(unpacked)
