"""Offload to a folder.

Each storage is written to a separate file, which is mapped and unlinked at once. So the system
frees the bytes when the mapping ends, also if the process is killed. A forked process can still
read the files that it shares with its parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import tempfile
from collections.abc import Iterator

import torch

from ckpt_wrap._errors import OffloadError
from ckpt_wrap._offloaded_storage import Stored


class _FileStored(Stored):
    """The bytes of one storage in a file without a name."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._mapped: mmap.mmap | None = None  # no tensor, or its bytes would count as memory
        self._device = torch.device("cpu")

    def take(self, source: torch.Tensor) -> None:
        self._device = source.device
        with explained(self._folder, f"cannot take {source.numel()} bytes"):
            self._mapped = _write(self._folder, source.cpu())

    def fetch(self) -> torch.Tensor:
        assert self._mapped is not None
        return torch.frombuffer(self._mapped, dtype=torch.uint8).to(self._device)


class DiskTier:
    """A folder for the tensors of any device.

    Raises:
        OffloadError: the folder cannot be written to.
    """

    idle = False

    def __init__(self, folder: str) -> None:
        self._folder = folder
        with explained(folder, "cannot be written to"), tempfile.TemporaryFile(dir=folder):
            pass

    def takes(self, device: torch.device) -> bool:
        """Whether tensors of this device are offloaded."""
        return device.type != "meta"

    def place(self) -> Stored:
        """Return a place for the bytes of a storage."""
        return _FileStored(self._folder)


def _write(folder: str, source: torch.Tensor) -> mmap.mmap:
    """Write the bytes of a flat tensor to a file, and map it."""
    with tempfile.NamedTemporaryFile(prefix="ckpt_wrap-", dir=folder, buffering=0) as file:
        # Not through the mapping: a full disk would raise a signal that ends the process.
        left = memoryview((ctypes.c_char * source.numel()).from_address(source.data_ptr()))
        while left:
            left = left[file.write(left) :]
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # writes stay private


@contextlib.contextmanager
def explained(folder: str, what: str) -> Iterator[None]:
    """Raise `OffloadError` for an error of the system."""
    try:
        yield
    except OSError as error:
        raise OffloadError(
            f"ckpt_wrap.offload_: folder '{folder}' {what} ({error.strerror}), but what is saved "
            "for backward must go there. Free some space or pass another folder as 'to'."
        ) from error
