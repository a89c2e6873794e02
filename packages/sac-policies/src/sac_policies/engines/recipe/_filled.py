"""Tensors of one value, as `torch.zeros` makes them, kept as that value; small integers as such.

First states of recurrences and empty results are made in a forward, without a gradient, and saved
for the first step. Three elements tell most others apart; the rest is then looked at.
Indices are made as integers of 64 bits, few of which need more than 16.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..._torch_compat import is_fake
from .._guards import is_immediate, stands_for, unnoticed
from ._proof import storage_of
from ._stand_ins import WatchedStandIn

LEAST_BYTES, LEAST_BYTES_OF_INTEGERS = 1024, 512
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Filled(WatchedStandIn):
    """A tensor of which one element is kept."""

    __slots__ = ("_dtype", "_geometry", "_held", "_numel", "_read")

    def __init__(
        self,
        tensor: torch.Tensor,
        held: Any,
        read: Callable[[Any], Any],
        changed: Callable[[], Exception],
    ) -> None:
        super().__init__(tensor, changed)
        self._numel, self._dtype = tensor.numel(), tensor.dtype
        self._geometry = (tensor.size(), tensor.stride())
        self._held, self._read = held, read

    def _made(self) -> torch.Tensor:
        return self._read(self._held).repeat(self._numel).as_strided(*self._geometry)


class Narrowed(Filled):
    """A tensor of integers of which the low bits are kept."""

    __slots__ = ()

    def _made(self) -> torch.Tensor:
        return self._read(self._held).to(self._dtype).as_strided(*self._geometry)


def filling_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the one element of a large tensor of one value; None for all others.

    Args:
        tensor: that no gradient flows to.
    """
    if tensor.requires_grad or type(tensor) is not torch.Tensor or is_fake(tensor):
        return None
    width = tensor.element_size()
    size = tensor.numel() * width
    if size < LEAST_BYTES or width not in _WORDS or not is_immediate(tensor):
        return None
    storage = tensor.untyped_storage()
    if storage.nbytes() != size:
        return None
    start = storage.data_ptr()
    first = ctypes.string_at(start, width)
    for at in (tensor.numel() - 1, tensor.numel() // 2):
        if ctypes.string_at(start + at * width, width) != first:
            return None
    element, same = unnoticed(_looked_at, tensor)
    if not same:
        return None
    stands_for(element, tensor)
    return element


def _looked_at(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The first element, and whether all have its bits."""
    flat = storage_of(tensor)
    words = flat.view(_WORDS[tensor.element_size()])
    return flat[:1].clone(), (words == words[0]).all()


def narrowed(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a large tensor of integers in a narrower dtype, in memory's order; None for others.

    Args:
        tensor: that no gradient flows to, and that the caller does not hold anyway.
    """
    if tensor.dtype not in (torch.int64, torch.int32) or is_fake(tensor):
        return None
    size = tensor.numel() * tensor.element_size()
    if size < LEAST_BYTES_OF_INTEGERS or tensor.untyped_storage().nbytes() != size:
        return None
    if not is_immediate(tensor):
        return None
    low, high = (int(each) for each in unnoticed(_ends, tensor))
    for dtype in (torch.uint8, torch.int16, torch.int32):
        info = torch.iinfo(dtype)
        if info.min <= low and high <= info.max and 8 * tensor.element_size() > info.bits:
            narrow = unnoticed(partial(_cast, dtype), tensor)
            stands_for(narrow, tensor)
            return narrow
    return None


def _cast(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    return storage_of(tensor).to(dtype)


def _ends(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.aminmax(tensor)
