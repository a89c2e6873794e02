"""A few forked processes that do one thing, say how far they are, and may be killed."""

from __future__ import annotations

import json
import os
import selectors
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch._dynamo  # an optimizer imports it, and a forked process would each time anew


class Crew:
    """Processes forked when it is entered, and gone when it is left.

    Args:
        work: called in each as `work(rank, say, folder, *arguments)`; `say` takes words to tell.
        size: how many.
        arguments: for each of them.

    Attributes:
        said: what was heard, in the order in which it came; `rank` is who said it.
    """

    def __init__(self, work: Callable[..., None], size: int, *arguments: Any) -> None:
        self._work, self._size, self._arguments = work, size, arguments
        self.said: list[dict[str, Any]] = []

    def __enter__(self) -> Crew:
        self.folder = Path(tempfile.mkdtemp(prefix="crew-"))
        self._selector = selectors.DefaultSelector()
        self._pids: list[int] = []
        for rank in range(self._size):
            read, write = os.pipe()
            pid = os.fork()
            if not pid:
                self._be(rank, write)
            os.close(write)
            self._pids.append(pid)
            self._selector.register(read, selectors.EVENT_READ, bytearray())
        return self

    def _be(self, rank: int, write: int) -> None:
        """Be one of them, to the end of this process."""
        torch.set_num_threads(1)
        os.dup2(os.open(self.folder / f"stderr-{rank}", os.O_WRONLY | os.O_CREAT), 2)

        def say(**words: Any) -> None:
            os.write(write, json.dumps({**words, "rank": rank}).encode() + b"\n")

        try:
            self._work(rank, say, self.folder, *self._arguments)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)

    def kill(self, rank: int) -> None:
        """End one at once."""
        os.kill(self._pids[rank], signal.SIGKILL)

    def listen_for(self, seconds: float) -> None:
        """Hear them for so long."""
        self.until(lambda: False, seconds)

    def wait(self, seconds: float) -> None:
        """Hear them until all have ended."""
        self.until(lambda: False, seconds)

    def until(self, condition: Callable[[], bool], seconds: float) -> None:
        """Hear them until a condition is met, the time is over, or all have ended."""
        end = time.monotonic() + seconds
        while not condition() and self._selector.get_map():
            left = end - time.monotonic()
            if left <= 0:
                return
            for key, _ in self._selector.select(left):
                unread = key.data
                data = os.read(key.fd, 1 << 16)
                if not data:
                    self._selector.unregister(key.fd)
                    os.close(key.fd)
                unread += data
                *lines, rest = bytes(unread).split(b"\n")
                unread[:] = rest
                self.said += [json.loads(line) for line in lines]

    def count(self, word: str) -> int:
        """How often something was said."""
        return sum(word in words for words in self.said)

    def last_words(self) -> str:
        """What each wrote last to stderr."""
        found = []
        for rank in range(self._size):
            text = (self.folder / f"stderr-{rank}").read_text(errors="replace").splitlines()
            found.append(f"rank {rank}: {text[-1][:300] if text else 'nothing'}")
        return "; ".join(found)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for pid in self._pids:
            os.kill(pid, signal.SIGKILL)  # not waited for yet, so it is still this process
        for pid in self._pids:
            os.waitpid(pid, 0)
        for key in list(self._selector.get_map().values()):
            os.close(key.fd)
        self._selector.close()
