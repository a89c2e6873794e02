"""A process that reads JSON jobs, one per line, and answers each with a JSON line.

The suite starts its processes here: those that run cases, and those of ranks.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
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

SHOWN_CHARACTERS = 1500
FINISHING_S = 5.0


class Worker:
    """One process, the queue of its answers, and the log file of its output."""

    def __init__(
        self,
        module: str,
        *arguments: str,
        log: Path,
        options: Sequence[str] = (),
        leads: bool = False,
    ) -> None:
        """Start `python -m module`, which calls `serve`, without waiting for it.

        Args:
            module: module that calls `serve`.
            arguments: of the module.
            log: file for its output.
            options: of the interpreter.
            leads: whether it may start processes itself, which end with it.
        """
        self.answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.is_ready = False
        self._log = log
        self._leads = leads and hasattr(os, "killpg")
        with log.open("w", encoding="utf-8") as errors:
            self.process = subprocess.Popen(
                [sys.executable, *options, "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment(),
                start_new_session=self._leads,
            )
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        """Put every answer into the queue, and None when the process has ended."""
        out = self.process.stdout
        assert out is not None
        with out, contextlib.suppress(ValueError):
            for line in out:
                self.answers.put(json.loads(line))
        self.answers.put(None)

    def becomes_ready(self, timeout_s: float) -> bool:
        """Wait for the first answer, which says that the process can accept jobs."""
        with contextlib.suppress(queue.Empty):
            self.is_ready = self.answers.get(timeout=max(timeout_s, 0.1)) is not None
        return self.is_ready

    def send(self, job: dict[str, Any]) -> None:
        """Send a job to the process. `None` among its answers means that it has ended."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(job) + "\n")
            self.process.stdin.flush()
        except OSError:
            self.answers.put(None)

    def finish(self) -> None:
        """Let an idle process end, so that it removes its files; kill it if it does not."""
        self.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(FINISHING_S)
        self.end()

    def end(self) -> None:
        """Kill the process, and the processes it started if it leads."""
        if self._leads and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        self.close()

    def close(self) -> None:
        """Send no more jobs: an idle process ends."""
        with contextlib.suppress(OSError):  # a job may still be in the pipe
            if self.process.stdin is not None:
                self.process.stdin.close()

    def printed(self) -> str:
        """Return the end of the process's log."""
        return self._log.read_text(encoding="utf-8", errors="replace")[-SHOWN_CHARACTERS:]


def serve(
    answer: Callable[[dict[str, Any], Callable[[dict[str, Any]], None]], dict[str, Any]],
) -> None:
    """Announce that the process is ready, and answer each job until standard input ends.

    Output that is printed during a job goes to standard error.

    Args:
        answer: called with a job, and with a function that sends messages before the answer.
    """
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as replies:
        os.dup2(2, 1)
        tell = functools.partial(_send, replies)
        tell({"ready": True})
        for line in sys.stdin:
            _send(replies, answer(json.loads(line), tell))


def _send(replies: IO[str], answer: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):  # the parent process may have ended
        replies.write(json.dumps(answer) + "\n")
        replies.flush()


def environment() -> dict[str, str]:
    """Return the environment variables of the suite's processes, with pytest's plugins disabled."""
    pytests = ("PYTEST_ADDOPTS", "PYTEST_PLUGINS", "PYTEST_DEBUG")
    kept = {word: value for word, value in os.environ.items() if word not in pytests}
    loopback = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    own = {"OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return {**loopback, **kept, **own}


def place_of(function: Callable[..., Any]) -> tuple[str, str, str]:
    """Return module, file and name of a function, for `find_function` in another process."""
    if "<locals>" in function.__qualname__:
        raise ValueError(
            f"ranks: {function.__qualname__} is a local function, which other processes cannot "
            "import. Move it to the level of its module."
        )
    module, file = function.__module__, str(Path(function.__code__.co_filename).resolve())
    # In the other process, `__main__` is another file.
    return "" if module == "__main__" else module, file, function.__name__


def find_function(module: str, file: str, name: str) -> Any:
    """Import a function by module name, or from its file if it is in no package."""
    if module and module not in sys.modules:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(module)
    if module not in sys.modules:
        module = module or Path(file).stem
        sys.path.insert(0, str(Path(file).parent))
        specification = importlib.util.spec_from_file_location(module, file)
        assert specification is not None
        assert specification.loader is not None
        sys.modules[module] = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(sys.modules[module])
    return getattr(sys.modules[module], name)
