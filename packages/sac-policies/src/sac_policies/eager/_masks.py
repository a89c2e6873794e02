"""Dropout masks as bits: an eighth of a byte per element."""

from __future__ import annotations

from typing import Any

import torch

from .._torch_compat import FAKE_TENSOR
from ._fingerprints import is_dense
from ._values import Operation

LEAST_ELEMENTS = 1024
"""Smaller masks are held as they are."""


def takes(tensor: Any) -> bool:
    """Whether a tensor is stored as bits: it is large and dense."""
    return (
        type(tensor) in (torch.Tensor, FAKE_TENSOR)
        and tensor.numel() >= LEAST_ELEMENTS
        and is_dense(tensor)
    )


def packed(mask: torch.Tensor) -> torch.Tensor:
    """Pack a mask of zeros and ones into bytes, as eight consecutive planes.

    Example:
        >>> packed(torch.ones(16, dtype=torch.bool)).tolist()
        [255, 255]
    """
    flat = torch.as_strided(mask, (mask.numel(),), (1,))
    ones = flat.to(torch.bool).view(torch.uint8)  # on a CPU ten times as fast as `!= 0`
    if beyond := -ones.numel() % 8:
        ones = torch.nn.functional.pad(ones, (0, beyond))
    return (ones.view(8, -1) << _shifts(ones)).sum(0, dtype=torch.uint8)


def unpacked(
    bits: torch.Tensor, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """Return the mask from its bits.

    Example:
        >>> unpacked(packed(torch.tensor([True, False, True])), (3,), (1,), torch.bool).tolist()
        [True, False, True]
    """
    numel = 1
    for size in shape:
        numel *= size
    ones = (bits >> _shifts(bits)).bitwise_and_(1).view(-1)[:numel]
    flags = torch.as_strided(ones, shape, stride)
    return flags.view(torch.bool) if dtype is torch.bool else flags.to(dtype)


def _shifts(ones: torch.Tensor) -> torch.Tensor:
    return torch.arange(8, dtype=torch.uint8, device=ones.device).view(8, 1)


UNPACK = Operation("the bits of a mask", unpacked, positions=(0,))
"""Restores a mask from its bits: on the tape, the operator of a call."""
