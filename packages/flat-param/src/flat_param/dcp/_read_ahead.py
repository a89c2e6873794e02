"""Has the disk read files ahead of who reads them, so that it goes on while bytes are looked at.

The system reads ahead for one who reads in order, but begins with the next stretch only when he has
come to it, and he has a lot to do with each. A thread that only reads is there sooner. What it is
after is that the system keeps what it has read: on Linux sendfile(2) to the null device copies no
byte and needs the interpreter once for many of them. Elsewhere it reads to memory that it uses
again and again.

posix_fadvise(2) would ask for the same without a thread, but Linux reads it in small pages then,
which takes longer than all the rest.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

AHEAD_BYTES = 64 << 20
_WORTH_BYTES = 1 << 20  # of which a reader has the rest as soon
_PIECE_BYTES = 4 << 20
_BLOCK_BYTES = 256 << 10


@dataclass(frozen=True)
class Stretch:
    """Some of a file's bytes.

    Args:
        path: of the file.
        start: the first byte.
        stop: the first one after the last.
    """

    path: Path
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Of all of it."""
        return self.stop - self.start


class ReadAhead:
    """A thread that reads ahead in files, until it is closed. What goes wrong is left to others.

    Positions count the bytes of all wanted stretches, one after another.
    """

    def __init__(self) -> None:
        self._left: deque[tuple[Stretch, int]] = deque()
        self._wanted_bytes = self._at = 0
        self._is_over = False
        self._moved = threading.Condition()
        self._thread: threading.Thread | None = None

    def guess(self, stretch: Stretch) -> None:
        """Begin with what most likely will be wanted, which nobody knows yet."""
        self._add([(stretch, 0)])

    def want(self, stretches: Iterable[Stretch]) -> int:
        """Go on with what is wanted, where it is long enough to be worth a thread.

        Returns:
            The position of the first.
        """
        first, places = self._wanted_bytes, list[tuple[Stretch, int]]()
        for stretch in stretches:
            places.append((stretch, self._wanted_bytes))
            self._wanted_bytes += stretch.nbytes
        self._add(places)
        return first

    def move(self, at: int) -> None:
        """Say up to which position all was read; at most 64 MiB more are read ahead."""
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

    def _add(self, places: list[tuple[Stretch, int]]) -> None:
        with self._moved:
            self._left += places
            self._moved.notify()
        if self._thread is None and sum(s.nbytes for s, _ in places) >= _WORTH_BYTES:
            self._thread = threading.Thread(target=self._run, name="reads ahead", daemon=True)
            with suppress(RuntimeError):  # a process that is ending starts no thread
                self._thread.start()

    def _run(self) -> None:
        with suppress(OSError), open(os.devnull, "wb", buffering=0) as nowhere:
            while self._once(lambda: bool(self._left)):
                path = self._left[0][0].path
                with path.open("rb", buffering=0) as file:
                    self._read_file(path, file, nowhere)

    def _read_file(self, path: Path, file: FileIO, nowhere: FileIO) -> None:
        """Stretches of one file, opened once: the system goes on from where it was in larger pages.

        What was guessed and is wanted is not read again.
        """
        at = 0
        while self._once(lambda: bool(self._left)) and self._left[0][0].path == path:
            stretch, position = self._left.popleft()
            if not stretch.start <= at <= stretch.stop:
                at = stretch.start
            while at < stretch.stop and self._may_read(position + at - stretch.start):
                found = _read_at(file, at, min(_PIECE_BYTES, stretch.stop - at), nowhere)
                if not found:
                    break
                at += found

    def _may_read(self, position: int) -> bool:
        return self._once(lambda: position < self._at + AHEAD_BYTES)

    def _once(self, ready: Callable[[], bool]) -> bool:
        """Until there is something to do; False where there will be nothing any more."""
        with self._moved:
            self._moved.wait_for(lambda: self._is_over or ready())
            return not self._is_over


def _read_at(file: FileIO, at: int, length: int, nowhere: FileIO) -> int:
    """Have the system read some bytes; how many there were."""
    send: Callable[..., int] | None = getattr(os, "sendfile", None)
    if send is not None:
        with suppress(OSError):  # other systems send to sockets only
            return send(nowhere.fileno(), file.fileno(), at, length)
    file.seek(at)
    return file.readinto(bytearray(min(_BLOCK_BYTES, length))) or 0
