"""Host buffers that are used again instead of allocated again.

Pinned memory is slow to allocate and stops the device while it is, so none is given back while
the pool lives. Threads and finalizers use one pool: a buffer comes and goes in one step.
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

E = TypeVar("E")

_SMALLEST_BYTES = 512
_STEPS_PER_OCTAVE = 8


def bucket_bytes(nbytes: int) -> int:
    """The size a buffer for `nbytes` is asked for, so that sizes recur.

    At most an eighth or 511 bytes more, whichever is larger; what torch's allocator of pinned
    memory adds to that, as it does for sizes that are no power of two, is not counted.

    Example:
        >>> bucket_bytes(1), bucket_bytes(1025), bucket_bytes(4096)
        (512, 1536, 4096)
    """
    step = max(_SMALLEST_BYTES, (1 << (max(nbytes, 1) - 1).bit_length() >> 1) // _STEPS_PER_OCTAVE)
    return max(1, -(-nbytes // step)) * step


class HostPool(Generic[E]):
    """Buffers by size; each comes with the event after which its last user is done with it.

    Args:
        allocate: makes a buffer of that many bytes, one-dimensional uint8.
    """

    def __init__(self, allocate: Callable[[int], torch.Tensor]) -> None:
        self._allocate = allocate
        self._free: dict[int, list[tuple[torch.Tensor, E]]] = {}
        self._sizes: list[int] = []
        self.allocations = 0
        self.allocated_bytes = 0

    def acquire(self, nbytes: int) -> tuple[torch.Tensor, E | None]:
        """A buffer of at least `nbytes`, and what to wait for before writing to it.

        A free buffer of up to a quarter more is taken rather than a new one made.
        """
        wanted = bucket_bytes(nbytes)
        if len(self._sizes) != len(self._free):
            self._sizes = sorted(self._free)
        least = bisect.bisect_left(self._sizes, wanted)
        most = bisect.bisect_right(self._sizes, wanted + wanted // 4)
        for size in self._sizes[least:most]:
            free = self._free[size]
            if free:
                with contextlib.suppress(IndexError):  # another thread was faster
                    return free.pop()
        self.allocations += 1
        self.allocated_bytes += wanted
        return self._allocate(wanted), None

    def release(self, buffer: torch.Tensor, event: E) -> None:
        """Give a buffer back, to be written to after `event`."""
        self._free.setdefault(buffer.numel(), []).append((buffer, event))
