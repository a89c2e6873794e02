"""Flat buffers that are used for a moment, again and again.

On CPU a large buffer that is freed goes back to the system, and the next one costs a page fault and
4 KiB of zeros for every page. Three buffers of each dtype are therefore kept: in backward one is
being filled, one is on its way, and one receives. On other devices torch's allocator does the
same, and nothing is kept here.
"""

from __future__ import annotations

import torch
from torch import Tensor

_KEPT = 3
_free: dict[torch.dtype, list[Tensor]] = {}


def acquire(numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised buffer of at least `numel` elements; see `release`."""
    kept = _free.get(dtype, []) if device.type == "cpu" else []
    for index, buffer in enumerate(kept):
        if buffer.numel() >= numel:
            return kept.pop(index)
    return torch.empty(numel, dtype=dtype, device=device)


def release(buffer: Tensor) -> None:
    """End the use of a borrowed buffer. The larger ones are kept."""
    if buffer.device.type == "cpu":
        kept = _free.setdefault(buffer.dtype, [])
        kept.append(buffer)
        kept.sort(key=Tensor.numel)
        del kept[:-_KEPT]
