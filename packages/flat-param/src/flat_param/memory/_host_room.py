"""Room for copies of tensors on the host, one after another."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ..layout._layout import round_up
from ._huge_pages import prefer_huge_pages

_ALIGN_BYTES = 64


class HostRoom:
    """Memory for copies of tensors, in huge pages where there is enough of it.

    A copy to memory of its own costs a page fault for every 4 KiB, which takes longer than the
    copying. What no copy was made to is never touched, and costs nothing.

    Args:
        tensors: which will be copied; more than these have room, too.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._left_bytes = sum(map(_room_bytes, tensors))
        self._room = torch.empty(0, dtype=torch.uint8, device="cpu")

    def copy(self, tensor: Tensor) -> Tensor:
        """A copy with the same shape, row-major."""
        length = _room_bytes(tensor)
        if self._room.numel() < length:
            size = max(length, self._left_bytes)
            self._room = torch.empty(size, dtype=torch.uint8, device="cpu")
            prefer_huge_pages(self._room)
        memory, self._room = self._room[: tensor.nbytes], self._room[length:]
        self._left_bytes -= length
        return memory.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())


def _room_bytes(tensor: Tensor) -> int:
    return round_up(tensor.nbytes, _ALIGN_BYTES)
