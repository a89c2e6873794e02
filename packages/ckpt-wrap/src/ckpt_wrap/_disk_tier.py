"""A folder as the place tensors go to, one file per storage, mapped when it is read.

Every process makes its own folder inside the given one, and holds a lock in it while it runs. It
removes the folder at exit, after an exception too. A folder whose process was killed is removed by
the next process that uses the same place.

- A process writes into its own folder, and removes only what it made. A forked child makes a folder
  at its first write, and may read its parent's files as long as the parent keeps them.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import itertools
import multiprocessing
import multiprocessing.util
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from ckpt_wrap._errors import OffloadError
from ckpt_wrap._offloaded_storage import Stored

try:
    import fcntl
except ImportError:  # a system without it keeps the folders of killed processes
    fcntl = None  # type: ignore[assignment]  # told apart below

_PREFIX = "ckpt_wrap-"
_LOCK = "owner.lock"
_numbers = itertools.count()
_folders: dict[tuple[int, Path], Path] = {}  # by process


class _FileStored(Stored):
    """The bytes of one storage in a file."""

    def __init__(self, path: Path, source: torch.Tensor) -> None:
        self._path = path
        self._device = source.device
        self._nbytes = source.numel()
        self._process = 0  # that wrote the file, and may remove it

    def take(self, source: torch.Tensor) -> None:
        with _explained(self._path.parent.parent, f"cannot take {self._nbytes} bytes"):
            _write(self._path, source.cpu())
        self._process = os.getpid()

    def fetch(self) -> torch.Tensor:
        # Mapped: read from the file as it is touched; writes stay private.
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

    def discard(self) -> None:
        # Tensors mapped from it stay valid.
        if os.getpid() == self._process:
            self._path.unlink(missing_ok=True)


class DiskTier:
    """A folder for the tensors of any device.

    Raises:
        OffloadError: the folder cannot be made or written to.
    """

    idle = False

    def __init__(self, folder: Path) -> None:
        self._parent = folder
        self._process = os.getpid()
        self.folder = own_folder(folder)

    def takes(self, device: torch.device) -> bool:
        """Whether the tensors of this device are to be moved."""
        return device.type != "meta"

    def place(self, source: torch.Tensor) -> _FileStored:
        """A file for the bytes of a flat tensor, which is not there yet.

        Raises:
            OffloadError: the folder cannot be made.
        """
        # Forked since, or the folder was removed.
        if os.getpid() != self._process or not self.folder.is_dir():
            self.folder = own_folder(self._parent)
            self._process = os.getpid()  # last: until then the previous folder is not written to
        return _FileStored(self.folder / f"{next(_numbers)}.bin", source)


def own_folder(parent: Path) -> Path:
    """This process's folder in `parent`; removes those of processes that are gone.

    Raises:
        OffloadError: it cannot be made.
    """
    process = os.getpid()
    made = _folders.get((process, parent))
    if made is not None and made.is_dir():
        return made
    with _explained(parent, "cannot be made or written to"):
        parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(parent)
        # Locked before it has the name, so that no other process takes it for abandoned.
        word = os.urandom(8).hex()
        new, folder = parent / f".new-{word}", parent / f"{_PREFIX}{process}-{word}"
        for each in (new, folder):  # before either is there
            _remove_when_over(each, process)
        try:
            new.mkdir(0o700)
            _try_lock(os.open(new / _LOCK, os.O_CREAT | os.O_RDWR))
            new.rename(folder)
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            raise
    _folders[process, parent] = folder
    return folder


def remove_abandoned(parent: Path) -> None:
    """Remove the folders in `parent` whose process no longer runs; leave all else as it is."""
    for folder in parent.glob(f"{_PREFIX}*"):
        # Another process removes it too, it is another user's, or no folder of this package.
        with contextlib.suppress(OSError):
            lock = os.open(folder / _LOCK, os.O_RDWR)
            try:
                if _try_lock(lock):
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def _remove_when_over(folder: Path, process: int) -> None:
    atexit.register(_remove_at_exit, folder, process)
    if multiprocessing.parent_process() is not None:  # such a process ends without atexit
        multiprocessing.util.Finalize(None, _remove_at_exit, (folder, process), exitpriority=0)


def _remove_at_exit(folder: Path, process: int) -> None:
    if os.getpid() == process:
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
    with open(path, "xb", buffering=0) as file:  # raises if the name is taken
        try:
            while left:
                left = left[file.write(left) :]
        except BaseException:
            path.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def _explained(folder: Path, what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OffloadError(
            f"ckpt_wrap.offload_: folder '{folder}' {what} ({error.strerror}), but what is saved "
            "for backward must go there. Free some space or pass another folder as 'to'."
        ) from error
