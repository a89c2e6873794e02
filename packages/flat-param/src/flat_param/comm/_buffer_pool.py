"""Temporary flat buffers that are reused by the units of one tree.

On CPU a freed large buffer goes back to the system, and the next one costs a page fault and 4 KiB
of zeros per page. So three buffers of each dtype are cached: in backward one is being filled, one
is being sent, and one receives. They are freed with the tree's modules. On other devices torch's
allocator caches memory, and nothing is kept here.
"""

from __future__ import annotations

import torch
from torch import Tensor

_KEPT = 3


class BufferPool:
    """Buffers by dtype."""

    def __init__(self) -> None:
        self._free: dict[torch.dtype, list[Tensor]] = {}

    def acquire(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialised buffer of at least `numel` elements; see `release`."""
        kept = self._free.get(dtype, []) if device.type == "cpu" else []
        for index, buffer in enumerate(kept):
            if buffer.numel() >= numel:
                return kept.pop(index)
        return torch.empty(numel, dtype=dtype, device=device)

    def release(self, buffer: Tensor) -> None:
        """Return a buffer to the pool. The larger ones are kept."""
        if buffer.device.type == "cpu":
            kept = self._free.setdefault(buffer.dtype, [])
            kept.append(buffer)
            kept.sort(key=Tensor.numel)
            del kept[:-_KEPT]
