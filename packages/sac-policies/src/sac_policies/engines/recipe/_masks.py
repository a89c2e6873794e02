"""Dropout masks as bits: what has two values, zero and another, is kept in an eighth of a byte.

On the CPU, and only there, torch multiplies with a mask of numbers, made in place: drawn, then
divided. That it was written to twice is how a mask is found; whether it has two values is then
looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..._torch_compat import is_fake
from .._guards import is_immediate, stands_for, unnoticed
from ._proof import storage_of
from ._stand_ins import StandIn

_WRITES = 2  # bernoulli_ and div_
LEAST_BYTES = 1024


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
        planes = torch.empty((8, bits.numel()), dtype=torch.uint8, device=bits.device)
        for at in range(8):
            torch.bitwise_and(bits >> at, 1, out=planes[at])
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
    if size < LEAST_BYTES or size != tensor.untyped_storage().nbytes():
        return None
    fake = is_fake(tensor)
    if not fake and (type(tensor) is not torch.Tensor or not is_immediate(tensor)):
        return None
    bits, scale, same = unnoticed(_packed, tensor)
    if not fake and not same:
        return None
    stands_for(bits, tensor)
    return bits, 1.0 if fake else float(scale)


def _packed(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Bits in eight planes, the largest value, and whether these two make the tensor again."""
    flat = storage_of(tensor)
    numel = flat.numel()
    length = (numel + 7) // 8
    scale = flat.max()
    ones = torch.zeros(8 * length, dtype=torch.uint8, device=tensor.device)
    torch.ne(flat, 0, out=ones[:numel].view(torch.bool))
    planes = ones.view(8, length)
    bits = planes[0].clone()
    for at in range(1, 8):
        bits |= planes[at] << at
    again = ones[:numel].to(tensor.dtype).mul_(scale)
    same = (again == flat).all() & (scale > 0) & ~(flat.signbit().any())
    return bits, scale, same
