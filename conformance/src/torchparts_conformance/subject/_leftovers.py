"""Ends what a process that ran a stranger's code left behind, where Linux lets us find it.

A process that parts from its parent becomes a child of whoever adopts its like. That is the judge,
while it judges; so nothing of the run is there any more when the results are written.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

_ADOPT = 36  # PR_SET_CHILD_SUBREAPER of <linux/prctl.h>


def adopt() -> None:
    """Become the parent of every process below this one that loses its own."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_ADOPT, 1, 0, 0, 0)


def end() -> None:
    """End every child, and those that come to this process as their parents end."""
    while children := _children():
        for child in children:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(child, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, 0)


def _children() -> list[int]:
    own, found = str(os.getpid()), []
    for path in Path("/proc").glob("[0-9]*/stat") if sys.platform == "linux" else ():
        with contextlib.suppress(OSError):
            # After the name, which may have any sign in it: state and parent.
            if path.read_text(errors="replace").rpartition(")")[2].split()[1] == own:
                found.append(int(path.parent.name))
    return found
