"""Has the bytes of a file on the disk while more of them are written."""

from __future__ import annotations

import os
import threading
from typing import BinaryIO

EVERY_BYTES = 16 << 20
_sync = getattr(os, "fdatasync", os.fsync)


class EarlySync:
    """A thread that syncs a file each time that 16 MiB more were written to it.

    The disk works beside the processor, and there is little left to wait for at the end. Not a
    pool of `concurrent.futures`: those do not work while the interpreter ends, where a save in a
    thread goes on.

    Args:
        file: open for writing.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._asked_at = 0
        self._wanted = threading.Event()
        self._over = False
        self._error: OSError | None = None
        self._thread: threading.Thread | None = None

    def written(self, end: int) -> None:
        """Say how long the file is now."""
        if end - self._asked_at < EVERY_BYTES:
            return
        self._asked_at = end
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"sync {self._file.name}")
            self._thread.start()
        self._wanted.set()

    def _run(self) -> None:
        while self._wanted.wait():
            self._wanted.clear()
            if self._over:  # asked after what `close` has set was taken back
                return
            try:
                _sync(self._file.fileno())
            except OSError as error:
                self._error = error
                return

    def close(self) -> None:
        """Wait for the thread.

        Raises:
            OSError: of a sync; the system tells of it only once, so the last sync would not.
        """
        self._over = True
        self._wanted.set()
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error
