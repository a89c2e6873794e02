"""Deletes folders: their names at once, and the bytes of their files behind the caller.

To give back a large file's bytes takes about as long as a quarter of writing them, since the disk
is told of each. A file that is open keeps them until it is closed, which a thread does.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_LARGE_BYTES, _MOST_FILES = 1 << 20, 64

_last: threading.Thread | None = None


def remove_folders(folders: Sequence[Path]) -> None:
    """Delete folders; what cannot be deleted stays. See `wait_for_room`."""
    opened: list[int] = []
    for folder in folders:
        opened += _opened(folder, _MOST_FILES - len(opened))
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    left = [folder for folder in folders if opened and folder.exists()]
    if not left:
        _close_behind(opened)
        return
    # File systems over a network keep a file that is open here under another name.
    _close(opened)
    for folder in left:
        shutil.rmtree(folder, ignore_errors=True)


def wait_for_room() -> None:
    """Until the disk has the room of all that this process has deleted."""
    if _last is not None and _last.is_alive():
        _last.join()


def _opened(folder: Path, most: int) -> list[int]:
    """The folder's large files, where the system deletes files that are open."""
    numbers: list[int] = []
    if os.name != "posix":
        return numbers
    with suppress(OSError), os.scandir(folder) as entries:  # also where it can open no more
        for entry in entries:
            if len(numbers) < most and entry.stat(follow_symlinks=False).st_size >= _LARGE_BYTES:
                numbers.append(os.open(entry.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK))
    return numbers


def _close_behind(numbers: Sequence[int]) -> None:
    global _last
    if not numbers:
        return
    wait_for_room()
    _last = threading.Thread(target=_close, args=(numbers,), name="gives back room on the disk")
    try:
        _last.start()
    except RuntimeError:  # a process that is ending starts no thread
        _close(numbers)


def _close(numbers: Sequence[int]) -> None:
    for number in numbers:
        os.close(number)
