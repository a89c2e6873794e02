"""Masks as bits: what has two values, zero and another, is kept in an eighth of a byte.

On the CPU, and only there, torch's dropout multiplies with a mask of numbers, made in place: drawn,
then divided. That it was written to twice is how a mask is found; whether it has two values is then
looked at.

Elsewhere its mask is one of truth values, as those of `where` and `masked_fill` are. Any such has
two values, so nobody looks. One that is there a second time is somebody's, who has it anyway (a
mask of attention, for all layers): it is kept as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ..._torch_compat import is_fake
from .._guards import is_immediate, stands_for, unnoticed
from ._proof import storage_of
from ._stand_ins import StandIn, WatchedStandIn

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
        ones = _unpacked(self._read(self._held), self._numel)
        return ones.to(self._dtype).mul_(self._scale).as_strided(*self._geometry)


class Flags(WatchedStandIn):
    """A kept mask of truth values."""

    __slots__ = ("_geometry", "_held", "_numel", "_read")

    def __init__(
        self,
        tensor: torch.Tensor,
        held: Any,
        read: Callable[[Any], Any],
        changed: Callable[[], Exception],
    ) -> None:
        super().__init__(tensor, changed)
        self._numel, self._geometry = tensor.numel(), (tensor.size(), tensor.stride())
        self._held, self._read = held, read

    def _made(self) -> torch.Tensor:
        """The mask, as truth values."""
        ones = _unpacked(self._read(self._held), self._numel)
        return ones.view(torch.bool).as_strided(*self._geometry)


_met = WeakIdKeyDictionary()
"""Storages of masks of truth values that were packed, as long as somebody has them."""


def are_flags(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a large mask of truth values, and none that was packed before.

    Args:
        tensor: that no gradient flows to.
    """
    if tensor.dtype is not torch.bool or not (type(tensor) is torch.Tensor or is_fake(tensor)):
        return False
    storage = tensor.untyped_storage()
    return LEAST_BYTES <= tensor.numel() == storage.nbytes() and storage not in _met


def flags_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return such a mask as bits; None for all else."""
    if not are_flags(tensor):
        return None
    _met[tensor.untyped_storage()] = None
    bits = unnoticed(_packed_flags, tensor)
    stands_for(bits, tensor)
    return bits


def _packed_flags(tensor: torch.Tensor) -> torch.Tensor:
    ones = storage_of(tensor).view(torch.uint8)
    beyond = -ones.numel() % 8
    return _packed_ones(torch.nn.functional.pad(ones, (0, beyond)) if beyond else ones)


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
    return _packed_ones(ones), high.view(tensor.dtype)


def _packed_ones(ones: torch.Tensor) -> torch.Tensor:
    """Put zeros and ones, a multiple of eight, into the planes of bytes."""
    return (ones.view(8, -1) << _shifts(ones)).sum(0, dtype=torch.uint8)


def _unpacked(bits: torch.Tensor, numel: int) -> torch.Tensor:
    """Return so many zeros and ones from planes."""
    return (bits >> _shifts(bits)).bitwise_and_(1).view(-1)[:numel]


def _shifts(bits: torch.Tensor) -> torch.Tensor:
    """How far the bits of each plane are shifted."""
    return torch.arange(8, dtype=torch.uint8, device=bits.device).view(8, 1)
