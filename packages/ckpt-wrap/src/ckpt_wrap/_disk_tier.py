"""Edge: a folder as the place tensors go to, one file per storage, mapped when it is read.

Every process has a folder of its own in the given one, and holds a lock in it while it runs. It
removes the folder when it exits, after an exception too; a folder whose process was killed is
removed by the next process that uses the same place.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import itertools
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from ckpt_wrap._errors import OffloadError

try:
    import fcntl
except ImportError:  # a system without it keeps the folders of killed processes
    fcntl = None  # type: ignore[assignment]  # told apart below

_PREFIX = "ckpt_wrap-"
_LOCK = "owner.lock"
_numbers = itertools.count()
_folders: dict[Path, Path] = {}


class FileStored:
    """The bytes of one storage in a file."""

    def __init__(self, path: Path, source: torch.Tensor) -> None:
        self._path = path
        self._device = source.device
        self._nbytes = source.numel()
        self._process = os.getpid()
        with _explained(path.parent.parent, self._nbytes):
            _write(path, source.cpu())

    def copied(self) -> bool:
        """Whether the source is no longer read: always, the copy is made at once."""
        return True

    def wait_copied(self) -> None:
        """Nothing to wait for."""

    def fetch(self) -> torch.Tensor:
        """The bytes, mapped: read from the file as they are touched; writes stay private.

        Raises:
            OffloadError: the file is gone or shorter than it was.
        """
        try:
            mapped = torch.from_file(
                str(self._path), shared=False, size=self._nbytes, dtype=torch.uint8
            )
        except RuntimeError as error:
            raise OffloadError(
                f"ckpt_wrap.offload_: file '{self._path}' cannot be read back, but backward needs "
                f"its {self._nbytes} bytes. Run forward again, and leave the folder alone until "
                "backward has run."
            ) from error
        return mapped.to(self._device)

    def wait_fetched(self) -> None:
        """Nothing to wait for."""

    def discard(self) -> None:
        """Remove the file; tensors mapped from it stay valid."""
        if os.getpid() == self._process:  # a forked child must leave its parent's files alone
            self._path.unlink(missing_ok=True)


class DiskTier:
    """A folder for the tensors of any device.

    Raises:
        OffloadError: the folder cannot be made or written to.
    """

    idle = False

    def __init__(self, folder: Path) -> None:
        self._parent = folder
        self.folder = own_folder(folder)

    def takes(self, device: torch.device) -> bool:
        """Whether the tensors of this device are to be moved."""
        return device.type != "meta"

    def store(self, source: torch.Tensor) -> FileStored:
        """Copy the bytes of a flat tensor to a file.

        Raises:
            OffloadError: the disk is full, or the folder can no longer be written to.
        """
        if not self.folder.is_dir():  # someone removed it since
            self.folder = own_folder(self._parent)
        return FileStored(self.folder / f"{next(_numbers)}.bin", source)


def own_folder(parent: Path) -> Path:
    """This process's folder in `parent`; removes those of processes that are gone.

    Raises:
        OffloadError: it cannot be made.
    """
    made = _folders.get(parent)
    if made is not None and made.is_dir():
        return made
    with _explained(parent, 0):
        parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(parent)
        # Locked before it has a name others look for, so nobody can take it for abandoned.
        new = Path(tempfile.mkdtemp(prefix=".new-", dir=parent))
        lock = os.open(new / _LOCK, os.O_CREAT | os.O_RDWR)
        _try_lock(lock)
        folder = new.rename(parent / f"{_PREFIX}{os.getpid()}-{new.name[5:]}")
    atexit.register(_remove_at_exit, folder, os.getpid())
    _folders[parent] = folder
    return folder


def remove_abandoned(parent: Path) -> None:
    """Remove the folders in `parent` whose process no longer runs."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(FileNotFoundError):  # another process may be removing it too
            lock = os.open(folder / _LOCK, os.O_RDWR)
            try:
                if _try_lock(lock):
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def _remove_at_exit(folder: Path, process: int) -> None:
    if os.getpid() == process:  # a forked child must leave its parent's folder alone
        shutil.rmtree(folder, ignore_errors=True)


def _try_lock(lock: int) -> bool:
    if fcntl is None:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _write(path: Path, source: torch.Tensor) -> None:
    # Not through a mapping: a full disk would show as a signal that ends the process.
    left = memoryview((ctypes.c_char * source.numel()).from_address(source.data_ptr()))
    try:
        with open(path, "xb", buffering=0) as file:
            while left:
                left = left[file.write(left) :]
    except OSError:
        path.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def _explained(folder: Path, nbytes: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OffloadError(
            f"ckpt_wrap.offload_: folder '{folder}' cannot take {nbytes} bytes "
            f"({error.strerror}), but what is saved for backward must go there. "
            "Free some space or pass another folder as 'to'."
        ) from error
