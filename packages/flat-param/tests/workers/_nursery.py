"""Forks the ranks of each run from one process, since importing torch takes longer than most runs.

Reads one JSON line per run, `{"script": ..., "ranks": [[argument, ...], ...], "folder": ...,
"timeout_s": ...}`, and answers with a line of exit statuses. What a rank says on stderr is in
`folder/stderr-<rank>`. Ranks that are still there after the time are killed.
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
import torch.distributed.checkpoint.state_dict  # the same
import torch.distributed.fsdp  # noqa: F401  # the same


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


def statuses(pids: list[int], timeout_s: float) -> list[int]:
    """Exit statuses by rank, negative for a signal."""
    deadline, found = time.monotonic() + timeout_s, {}
    while len(found) < len(pids):
        for pid in set(pids) - set(found):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                found[pid] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                os.kill(pid, signal.SIGTERM)
        time.sleep(0.005)
    return [found[pid] for pid in pids]


def serve(run: dict[str, Any]) -> list[int]:
    """One run, from its first fork to its last rank's end."""
    folder = Path(run["folder"])
    pids = [
        start(run["script"], arguments, folder / f"stderr-{rank}")
        for rank, arguments in enumerate(run["ranks"])
    ]
    return statuses(pids, run["timeout_s"])


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(serve(json.loads(line))), flush=True)
