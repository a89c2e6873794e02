"""Asks Linux for huge pages under a large buffer that is about to be filled.

The first touch of a fresh buffer costs a page fault and 4 KiB of zeros for every page, which takes
longer than the copy that touches it. With pages of 2 MiB there is one fault where there were 512.
The advice, madvise(2) with MADV_HUGEPAGE, is for one range of addresses: nothing else in the
process changes, and it goes when the memory is given back to the system.

Rule: it is advice. Whatever refuses it leaves a buffer that works as well, only filled more slowly,
so a refusal is an answer and not an error.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable
from functools import cache

from torch import Tensor

HUGE_PAGE_BYTES = 2 << 20
_LEAST_BYTES = 2 * HUGE_PAGE_BYTES
_MADV_DONTNEED, _MADV_HUGEPAGE = 4, 14  # include/uapi/asm-generic/mman-common.h


def prefer_huge_pages(tensor: Tensor) -> bool:
    """Ask for huge pages under a contiguous CPU tensor; whether the system took the advice.

    Only whole huge pages inside the tensor are asked for, so no memory beyond it is touched.
    """
    if tensor.device.type != "cpu" or tensor.nbytes < _LEAST_BYTES:
        return False
    madvise = _madvise()
    if madvise is None:
        return False
    start, stop = pages_inside(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)
    return madvise(start, stop - start, _MADV_HUGEPAGE) == 0


def forget_pages(mapped: Tensor) -> bool:
    """Take a mapped file's pages out of this process; whether the system took the advice.

    Only for tensors over a shared mapping of a file, which keeps what was written to them.
    """
    madvise = _madvise()
    if madvise is None:
        return False
    page = mmap.PAGESIZE
    start = mapped.data_ptr() // page * page
    return madvise(start, mapped.data_ptr() + mapped.nbytes - start, _MADV_DONTNEED) == 0


def pages_inside(start: int, stop: int) -> tuple[int, int]:
    """The whole huge pages within `[start, stop)`, as addresses; equal ones where there is none.

    Example:
        >>> pages_inside(1, 3 * HUGE_PAGE_BYTES) == (HUGE_PAGE_BYTES, 3 * HUGE_PAGE_BYTES)
        True
    """
    first = -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    return first, max(first, stop // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES)


@cache
def _madvise() -> Callable[[int, int, int], int] | None:
    """The C library's function, or None where there is none or it means something else."""
    if sys.platform != "linux":
        return None
    try:
        madvise = ctypes.CDLL(None).madvise
    except (AttributeError, OSError):
        return None
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    madvise.restype = ctypes.c_int
    found: Callable[[int, int, int], int] = madvise
    return found
