"""Where optimizer state lies between steps: CPU memory, or a folder.

Rule 1: whatever a tier allocates is a tensor that anybody may read, so state dicts and checkpoints
        need not know of tiers.
Rule 2: what a folder holds is a file that is mapped and has lost its name: it takes room on the
        disk from the start, so a full disk is an error here and never a signal later, and it is
        gone with the process, however that ends.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import tempfile
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from .._errors import StateError
from ..layout._spec import dense_stride

_ALIGN_BYTES = 64
_ZEROS = bytes(1 << 20)


class Tier(Protocol):
    """Memory for state between steps."""

    def moves(self, device: torch.device) -> bool:
        """Whether state on a device is elsewhere than here."""
        ...

    def allocate(self, nbytes: int) -> Tensor:
        """Uninitialised `(nbytes,)` bytes."""
        ...

    def settle(self, stored: Sequence[Tensor]) -> None:
        """Be told that these have been written, and are not read soon."""
        ...

    def check(self) -> None:
        """Refuse where this process may not use what is here."""
        ...


class HostTier:
    """CPU memory, pinned where there is an accelerator to copy from it."""

    def moves(self, device: torch.device) -> bool:
        """State on the CPU is here already."""
        return device.type != "cpu"

    def allocate(self, nbytes: int) -> Tensor:
        """New memory, pinned or not."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=torch.accelerator.is_available())

    def settle(self, stored: Sequence[Tensor]) -> None:
        """CPU memory has nothing to do then."""

    def check(self) -> None:
        """A process that is forked has a copy of its own."""


class FolderTier:
    """Files of a folder (Rule 2).

    Args:
        folder: that exists.

    Raises:
        StateError: it is no folder, or nothing can be written there.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = os.fspath(folder)
        self._process = os.getpid()
        self.allocate(_ALIGN_BYTES)

    def moves(self, device: torch.device) -> bool:
        """State in memory of any kind is not in a file."""
        return True

    def allocate(self, nbytes: int) -> Tensor:
        """A new file, mapped.

        Raises:
            StateError: there is no such folder, or no room in it.
        """
        try:
            handle, path = tempfile.mkstemp(prefix="optimizer-state-", dir=self.folder)
        except OSError as error:
            raise self._refused(nbytes, error) from error
        try:
            _reserve(handle, nbytes)
            memory = torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
        except OSError as error:
            raise self._refused(nbytes, error) from error
        finally:
            os.close(handle)
            os.unlink(path)
        return memory

    def _refused(self, nbytes: int, error: OSError) -> StateError:
        return StateError(
            f"flat_param.offload_optimizer: {nbytes} bytes of state cannot be written to folder "
            f"'{self.folder}' ({error.strerror}), but state is kept in files there. Pass a "
            "writable folder that has room for all of it."
        )

    def settle(self, stored: Sequence[Tensor]) -> None:
        """Let the system have their pages back: they are in the file."""
        for tensor in stored:
            _forget_pages(tensor)

    def check(self) -> None:
        """Refuse a forked process: its writes would be in its parent's state.

        Raises:
            StateError: in another process than the one that made the files.
        """
        if os.getpid() != self._process:
            raise StateError(
                f"flat_param.offload_optimizer: process {os.getpid()} was forked from "
                f"{self._process}, whose state is in folder '{self.folder}', but both would write "
                "to it. Build an optimizer in the new process."
            )


_MADV_DONTNEED = 4  # include/uapi/asm-generic/mman-common.h


def _forget_pages(mapped: Tensor) -> None:
    """Take a mapped file's pages out of this process's memory; the file keeps what was written."""
    if sys.platform != "linux":
        return
    start = mapped.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    length = mapped.data_ptr() + mapped.nbytes - start
    ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_DONTNEED)


def _reserve(handle: int, nbytes: int) -> None:
    """Take room on the disk for an empty file (Rule 2)."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(handle, 0, nbytes)
        return
    while nbytes > 0:
        nbytes -= os.write(handle, _ZEROS[:nbytes])


def lay_out(values: Sequence[Tensor], tier: Tier) -> list[Tensor]:
    """Tensors like `values` in one allocation of a tier, uninitialised."""
    ends = [0]
    for value in values:
        ends.append(ends[-1] + aligned(_nbytes(value)))
    memory = tier.allocate(ends[-1])
    return [
        _like(value, memory[start : start + _nbytes(value)])
        for value, start in zip(values, ends, strict=False)
    ]


def aligned(nbytes: int) -> int:
    """What so many bytes of one value take in a tier."""
    return -(-nbytes // _ALIGN_BYTES) * _ALIGN_BYTES


def _like(value: Tensor, memory: Tensor) -> Tensor:
    flat = memory.view(value.dtype)
    return flat.as_strided(value.shape, packed_stride(value), flat.storage_offset())


def _nbytes(value: Tensor) -> int:
    return value.numel() * value.element_size()


def packed_stride(value: Tensor) -> tuple[int, ...]:
    """A tensor's stride where it fills memory without holes, or what is nearest to it."""
    return dense_stride(tuple(value.shape), value.stride())
