"""Has the disk read a file ahead of who reads it, so that it goes on while bytes are looked at.

The system reads ahead for one who reads in order, but begins with the next stretch only when he has
come to it, and he has a lot to do with each. A thread that only reads is there sooner. It reads to
memory that it uses again and again: what it is after is that the system keeps what it has read.
posix_fadvise(2) would ask for the same without a thread, but Linux reads it in small pages then,
which takes longer than all the rest.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from io import FileIO
from pathlib import Path

AHEAD_BYTES = 64 << 20
_BLOCK_BYTES = 256 << 10


class ReadAhead:
    """A thread that reads ahead in a file, until it is closed. What goes wrong is left to others.

    Args:
        path: of the file, which it opens for itself.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0
        self._is_over = False
        self._moved = threading.Condition()
        self._thread: threading.Thread | None = None

    def start(self, start: int, stop: int) -> None:
        """Begin with what is wanted, where it is long enough to be worth a thread.

        Args:
            start: the first byte.
            stop: the first one after the last.
        """
        self._at = start
        if stop - start < 4 * _BLOCK_BYTES:
            return
        self._thread = threading.Thread(
            target=self._run, args=(start, stop), name=f"reads {self._path} ahead", daemon=True
        )
        with suppress(RuntimeError):  # a process that is ending starts no thread
            self._thread.start()

    def move(self, at: int) -> None:
        """Say how far the file was read; at most 64 MiB more are read ahead."""
        with self._moved:
            self._at = at
            self._moved.notify()

    def close(self) -> None:
        """Read no more."""
        with self._moved:
            self._is_over = True
            self._moved.notify()
        # One that Ctrl-C came to as it started is not waited for, and has nothing left to do.
        if self._thread is not None and self._thread.is_alive():
            self._thread.join()

    def _run(self, at: int, stop: int) -> None:
        with suppress(OSError), self._path.open("rb", buffering=0) as file:
            block = memoryview(bytearray(_BLOCK_BYTES))
            while at < stop and self._may_read(at):
                here = block[: min(_BLOCK_BYTES, stop - at)]
                if not _is_in_memory(file, at + len(here) - 1):
                    file.seek(at)
                    if not file.readinto(here):
                        return
                at += len(here)

    def _may_read(self, at: int) -> bool:
        with self._moved:
            self._moved.wait_for(lambda: self._is_over or at < self._at + AHEAD_BYTES)
            return not self._is_over


def _is_in_memory(file: FileIO, at: int) -> bool:
    """Whether a byte can be had without the disk, where the system tells."""
    read: Callable[..., int] | None = getattr(os, "preadv", None)
    flag: int | None = getattr(os, "RWF_NOWAIT", None)
    if read is None or flag is None:
        return False
    try:
        return read(file.fileno(), [bytearray(1)], at, flag) == 1
    except OSError:
        return False
