"""Several forked processes that report progress and may be killed."""

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
import torch._dynamo  # optimizers import it; importing before the fork saves time in each process


class Crew:
    """Processes that are forked on entry and ended on exit.

    Args:
        work: called in each process as `work(rank, say, folder, *arguments)`; `say` reports words.
        size: number of processes.
        arguments: passed to each of them.

    Attributes:
        said: reports in order of arrival, with their `rank`.
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
        """Run `work` in a forked process."""
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
        """Kill one process."""
        os.kill(self._pids[rank], signal.SIGKILL)

    def listen_for(self, seconds: float) -> None:
        """Collect reports for some seconds."""
        self.until(lambda: False, seconds)

    def wait(self, seconds: float) -> None:
        """Collect reports until all have ended."""
        self.until(lambda: False, seconds)

    def until(self, condition: Callable[[], bool], seconds: float) -> None:
        """Collect reports until a condition holds, the time is over, or all have ended."""
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
        """Return how often a word was reported."""
        return sum(word in words for words in self.said)

    def last_words(self) -> str:
        """Return the last line of stderr of each."""
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
            os.kill(pid, signal.SIGKILL)  # not reaped yet, so the id is still this process's
        for pid in self._pids:
            os.waitpid(pid, 0)
        for key in list(self._selector.get_map().values()):
            os.close(key.fd)
        self._selector.close()
