"""A process of the suite's own that is given one job a line and answers one line for each.

Jobs go to its standard input and answers come from its standard output, both as JSON; what it
prints otherwise goes to a file. The first line it answers says that it is ready.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from torchparts_conformance.subject import _isolation

SHOWN_CHARACTERS = 1500


class Worker:
    """One process, the queue its answers arrive in, and the file it prints to."""

    def __init__(self, command: Sequence[str], *, log: Path, leads: bool = False) -> None:
        """Start a command without waiting for it.

        Args:
            command: that calls `serve`.
            log: file for what it prints.
            leads: it may start processes itself, which are to end with it.
        """
        self.answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.is_ready = False
        self._log = log
        self._leads = leads and hasattr(os, "killpg")
        with log.open("w", encoding="utf-8") as errors:
            self.process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=_environment(),
                start_new_session=self._leads,
            )
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        """Put every answer into the queue, and None when the process has ended."""
        out = self.process.stdout
        assert out is not None
        for line in out:
            try:
                self.answers.put(json.loads(line))
            except ValueError:
                break
        out.close()
        self.answers.put(None)

    def becomes_ready(self, timeout_s: float) -> bool:
        """Wait for the first answer, which says that the process can take jobs."""
        try:
            self.is_ready = self.answers.get(timeout=max(timeout_s, 0.1)) is not None
        except queue.Empty:
            return False
        return self.is_ready

    def send(self, job: dict[str, Any]) -> None:
        """Give the process a job; a process that is gone is found out when it does not answer."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(job) + "\n")
            self.process.stdin.flush()
        except OSError:
            self.answers.put(None)

    def end(self) -> None:
        """Kill the process, and wait until nothing of it is left."""
        if self._leads and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        try:
            if self.process.stdin is not None:
                self.process.stdin.close()
        except OSError:  # a job was still on its way to the process
            self.answers.put(None)

    def printed(self) -> str:
        """Give the end of what the process printed."""
        return self._log.read_text(encoding="utf-8", errors="replace")[-SHOWN_CHARACTERS:]


def serve(answer: Callable[[dict[str, Any]], dict[str, Any]], *, ready: dict[str, Any]) -> None:
    """Be the other side of a `Worker`: answer each job until standard input ends.

    What is printed while a job is done goes to standard error.
    """
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as replies:
        os.dup2(2, 1)
        _send(replies, ready)
        for line in sys.stdin:
            _send(replies, answer(json.loads(line)))


def _send(replies: IO[str], answer: dict[str, Any]) -> None:
    # The side that asks may be gone already, and then there is nobody left to tell.
    with contextlib.suppress(BrokenPipeError):
        replies.write(json.dumps(answer) + "\n")
        replies.flush()


def _environment() -> dict[str, str]:
    loopback = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    return {"OMP_NUM_THREADS": "1", **loopback, **_isolation.environment()}
