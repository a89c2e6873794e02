"""Edge: the process that runs a stranger's code, seen from the one that judges it.

Rule 1: a stranger's code may print as much as it wants; of that, nothing is shown but the last
line, and only if the process left no report.
Rule 2: pytest gets no plugins and options from the environment: they could change outcomes.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO

from torchparts_conformance import _progress

FINISHING_S = 60.0
_DRAINING_S = 5.0
_LINE_CHARACTERS = 4096
_COMPLAINT = "ERROR: "


@dataclass
class Ended:
    """How a process ended: its status, what pytest complained of, and the last line it printed."""

    status: int = 0
    complaint: str = ""
    last_line: str = ""


def run(command: Sequence[str]) -> Ended:
    """Run a command, show how far it is, and wait for it; after Ctrl-C it may write its report."""
    ended = Ended()
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=_environment(),
        encoding="utf-8",
        errors="replace",
    )
    assert process.stderr is not None
    listener = threading.Thread(target=_listen, args=(process.stderr, ended), daemon=True)
    listener.start()
    with process:
        ended.status = _wait(process)
        # What the process started may still hold the pipe; nobody waits for that.
        listener.join(_DRAINING_S)
    return ended


def _wait(process: subprocess.Popen[str]) -> int:
    try:
        return process.wait()
    except KeyboardInterrupt:  # the process got it too, and notes what did not run
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(FINISHING_S)
        process.kill()
        return process.wait()


def _listen(printed: IO[str], ended: Ended) -> None:
    while line := printed.readline(_LINE_CHARACTERS):
        if _progress.show(line) or not line.strip():
            continue
        ended.last_line = line.strip()
        if line.startswith(_COMPLAINT):
            ended.complaint = line.removeprefix(_COMPLAINT).strip()


def _environment() -> dict[str, str]:
    words = {k: v for k, v in os.environ.items() if k not in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS")}
    return {**words, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
