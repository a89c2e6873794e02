"""Dropout masks as bits: what has two values, zero and another, is kept in an eighth of a byte.

On the CPU, and only there, torch multiplies with a mask of numbers, made in place: drawn, then
divided. That it was written to twice is how a mask is found; whether it has two values is then
looked at.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ..._torch_compat import is_fake
from .._guards import is_immediate, stands_for, unnoticed
from ._proof import storage_of
from ._stand_ins import StandIn

_WRITES = 2  # bernoulli_ and div_
LEAST_BYTES = 1024
_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Mask(StandIn):
    """A kept mask."""

    __slots__ = ("_dtype", "_geometry", "_held", "_numel", "_read", "_scale")

    def __init__(
        self, tensor: torch.Tensor, scale: float, held: Any, read: Callable[[Any], Any]
    ) -> None:
        super().__init__()
        self._dtype, self._numel, self._scale = tensor.dtype, tensor.numel(), scale
        self._geometry = (tensor.size(), tensor.stride())
        self._held, self._read = held, read

    def _made(self) -> torch.Tensor:
        """The mask, as numbers."""
        bits = self._read(self._held)
        planes = (bits >> _shifts(bits)).bitwise_and_(1)
        flat = planes.view(-1)[: self._numel].to(self._dtype).mul_(self._scale)
        return flat.as_strided(*self._geometry)


def bits_of(tensor: torch.Tensor) -> tuple[torch.Tensor, float] | None:
    """Return a mask as bits, and its other value; None for what is no mask, or a small one.

    Args:
        tensor: that no gradient flows to.
    """
    if tensor._version != _WRITES or not tensor.is_floating_point() or tensor.requires_grad:
        return None
    size = tensor.numel() * tensor.element_size()
    if (
        tensor.element_size() not in _WORDS
        or size < LEAST_BYTES
        or size != tensor.untyped_storage().nbytes()
    ):
        return None
    fake = is_fake(tensor)
    if not fake and (type(tensor) is not torch.Tensor or not is_immediate(tensor)):
        return None
    packed = unnoticed(_packed, tensor)
    if packed is None:
        return None
    bits, high = packed
    scale = 1.0 if fake else float(high)
    if not math.isfinite(scale):  # what is no number, times zero, is none
        return None
    stands_for(bits, tensor)
    return bits, scale


def _packed(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Bits in eight planes, and the other value; None where there are more, or a negative one.

    Words are compared, not values: of what is not negative the largest has the largest word, and
    a zero with a sign is no zero.
    """
    flat = storage_of(tensor)
    words = flat.view(_WORDS[tensor.element_size()])
    high = words.max()
    length = (flat.numel() + 7) // 8
    ones = torch.zeros(8 * length, dtype=torch.uint8, device=tensor.device)
    kept = torch.ne(words, 0, out=ones[: flat.numel()].view(torch.bool))
    if not is_fake(tensor) and not torch.equal(kept, words == high):
        return None
    bits = (ones.view(8, length) << _shifts(ones)).sum(0, dtype=torch.uint8)
    return bits, high.view(tensor.dtype)


def _shifts(bits: torch.Tensor) -> torch.Tensor:
    """How far the bits of each plane are shifted."""
    return torch.arange(8, dtype=torch.uint8, device=bits.device).view(8, 1)
