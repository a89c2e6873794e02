"""Forks what `python ARGUMENTS` would do from one process, which has imported what takes long.

`Nursery` is what tests use. The process itself is this file, run with the arguments of what it does
once before the first fork; then it reads a JSON line for each child, and answers with its status.
No thread is in a fork but the one that asked for it, so whatever is done before must leave none.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path


class Nursery:
    """The process of which each run is a child."""

    def __init__(self, *before: str, python: Sequence[str] = (sys.executable,)) -> None:
        """Start it.

        Args:
            before: arguments of Python for what is done once, such as an import.
            python: the command that starts Python.
        """
        self._process = subprocess.Popen(
            [*python, str(Path(__file__).resolve()), *before],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str, said: Path, timeout_s: float = 300) -> int:
        """Do what `python ARGUMENTS` does; gives its exit status, negative for a signal.

        Args:
            arguments: `-m` and a module, `-c` and code, or a script, with what is for them.
            said: file for what it prints.
            timeout_s: after which it is killed.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        job = {"arguments": arguments, "said": str(said), "timeout_s": timeout_s}
        print(json.dumps(job), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        assert answer, "the nursery has ended, see above"
        return int(answer)

    def close(self) -> None:
        """Let it end."""
        self._process.communicate()


def do(arguments: list[str]) -> None:
    """Do what `python *arguments` does."""
    first, *rest = arguments
    if first == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv = [first, *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = arguments
        sys.path[0] = str(Path(first).resolve().parent)
        runpy.run_path(first, run_name="__main__")


def status_of(arguments: list[str]) -> int:
    """Do it; gives the exit status that Python would end with."""
    try:
        do(arguments)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return int(end.code or 0)
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def start(arguments: list[str], said: str) -> int:
    """Fork a child that does it, and ends; gives its process id."""
    if pid := os.fork():
        return pid
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT), 1)
    os.dup2(1, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.exit(status_of(arguments))  # as a Python of its own: with what waits for its end


def wait_for(pid: int, timeout_s: float) -> int:
    """Wait for a child, which is killed after the time; gives its status."""
    deadline = time.monotonic() + timeout_s
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    return os.waitstatus_to_exitcode(ended[1])


def main(before: list[str]) -> None:
    """Do what is done once, and serve until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    status_of(before)
    gc.freeze()  # no child looks through what all of them share
    tasks = Path("/proc/self/task")
    names = [(task / "comm").read_text().strip() for task in tasks.glob("*")]
    assert len(names) < 2, f"{names} run, but a fork has only one thread"
    for line in sys.stdin:
        job = json.loads(line)
        pid = start(job["arguments"], job["said"])
        print(wait_for(pid, job["timeout_s"]), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
