"""Forks the ranks of each run from one process, since importing torch takes longer than most runs.

Reads JSON lines, each a list of runs `{"script": ..., "ranks": [[argument, ...], ...], "folder":
..., "timeout_s": ...}`, and answers each with a line of lists of exit statuses. A few runs of a
list go on at a time. What a rank says on stderr is in `folder/stderr-<rank>`. Ranks that are still
there after the time are killed.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import _harness  # noqa: F401  # and with it torch and flat_param, before the first fork
import pytest  # noqa: F401  # what workers import, too
import torch._dynamo  # what torch.compiler.disable imports at its first use, for 1.4 s
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp  # noqa: F401

AT_A_TIME = 4


def be_rank(script: str, arguments: list[str], stderr: Path) -> None:
    """Run a script as `python script *arguments` would, in this process, and end it."""
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT), 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    sys.argv = [script, *arguments]
    status = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stderr.flush()
    os._exit(status)


def start(script: str, arguments: list[str], stderr: Path) -> int:
    """Fork one rank."""
    pid = os.fork()
    if not pid:
        be_rank(script, arguments, stderr)
    return pid


class Ranks:
    """The ranks of one run, from its first fork to its last rank's end."""

    def __init__(self, run: dict[str, Any]) -> None:
        folder = Path(run["folder"])
        self.pids = [
            start(run["script"], arguments, folder / f"stderr-{rank}")
            for rank, arguments in enumerate(run["ranks"])
        ]
        self.deadline = time.monotonic() + run["timeout_s"]
        self.found: dict[int, int] = {}

    def have_ended(self) -> bool:
        """Collect finished ranks, and terminate those past the deadline."""
        for pid in set(self.pids) - set(self.found):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self.found[pid] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > self.deadline:
                os.kill(pid, signal.SIGTERM)
        return len(self.found) == len(self.pids)

    def statuses(self) -> list[int]:
        """Exit statuses by rank, negative for a signal."""
        return [self.found[pid] for pid in self.pids]


def serve(runs: list[dict[str, Any]]) -> list[list[int]]:
    """Some runs, a few at a time."""
    begun: list[Ranks] = []
    while len(begun) < len(runs) or not all(each.have_ended() for each in begun):
        while len(begun) < len(runs) and sum(not each.have_ended() for each in begun) < AT_A_TIME:
            begun.append(Ranks(runs[len(begun)]))
        time.sleep(0.005)
    return [each.statuses() for each in begun]


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(serve(json.loads(line))), flush=True)
