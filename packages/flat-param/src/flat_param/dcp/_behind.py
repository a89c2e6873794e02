"""What a save does behind the one that writes: syncs its file, and reads what it has."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from functools import cache
from queue import Queue
from typing import BinaryIO

EVERY_BYTES = 16 << 20
_sync = getattr(os, "fdatasync", os.fsync)
_WRITE = 2  # SYNC_FILE_RANGE_WRITE, include/uapi/linux/fs.h


class Behind:
    """Carries out tasks one after another, in a thread that begins with the first.

    Not a pool of `concurrent.futures`: those do not work while the interpreter ends, where a save
    in a thread goes on. Where no thread can be started any more, the caller carries them out.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: Queue[Callable[[], object] | None] = Queue()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._over = False

    def do(self, task: Callable[[], object]) -> None:
        """Have one more task carried out, unless one before it fails."""
        self._tasks.put(task)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name)
            try:
                self._thread.start()
            except RuntimeError:  # a process that is ending, or has too many
                self._thread = None
                self._tasks.put(None)
                self._run()

    def wait(self) -> None:
        """Until all tasks are done.

        Raises:
            BaseException: what one of them has raised; those behind it were not carried out.
        """
        self._tasks.join()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Wait for the task under way; those behind it are not carried out."""
        self._over = True
        self._tasks.put(None)
        # One that Ctrl-C came to as it started is not waited for, and has nothing left to do.
        if self._thread is not None and self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while True:
            task = self._tasks.get()
            try:
                if task is None:
                    return
                if not self._over and self._error is None:
                    task()
            except BaseException as error:
                self._error = error
            finally:
                self._tasks.task_done()


class EarlySync:
    """Has the disk write a file while more of it is written, so that little is left at the end.

    Linux is asked to begin, which waits for nothing and writes no journal. What goes wrong then,
    the last sync tells. Elsewhere the file is synced each time that 16 MiB more were written.

    Args:
        file: open for writing.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._begun = self._synced = 0

    def until(self, stop: int) -> None:
        """Begin with what was written before `stop`.

        Raises:
            OSError: of a sync; the system tells of it only once, so the last sync would not.
        """
        start, self._begun = self._begun, stop
        begin = _begin_writing()
        if begin is not None and begin(self._file.fileno(), start, stop - start, _WRITE) == 0:
            return
        if stop - self._synced >= EVERY_BYTES:
            self._synced = stop
            _sync(self._file.fileno())


@cache
def _begin_writing() -> Callable[[int, int, int, int], int] | None:
    """Linux's sync_file_range(2), or None where there is none."""
    try:
        begin = ctypes.CDLL(None).sync_file_range
    except (AttributeError, OSError, TypeError):  # a TypeError on Windows
        return None
    begin.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    begin.restype = ctypes.c_int
    found: Callable[[int, int, int, int], int] = begin
    return found
