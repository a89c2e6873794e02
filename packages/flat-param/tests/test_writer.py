"""The thread of an asynchronous save, and the end of the interpreter."""

from __future__ import annotations

import subprocess
import sys

import pytest

_PROGRAM = """
import sys, time
from flat_param.checkpoint._save import _start

def save():
    time.sleep(0.5)
    print("written", flush=True)
    if sys.argv[1] == "fails":
        raise OSError("the disk is gone")

assert not _start(save, "there").cancel()
if sys.argv[1] == "interrupted":
    raise KeyboardInterrupt
print("over", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ends", "fails", "interrupted"])
def test_interpreter_waits_for_a_save(how: str) -> None:
    """Also after Ctrl-C; an error is written to stderr."""
    found = subprocess.run(
        [sys.executable, "-c", _PROGRAM, how], capture_output=True, text=True, timeout=100
    )
    assert found.stdout.splitlines() == (
        ["written"] if how == "interrupted" else ["over", "written"]
    )
    told = "flat_param.async_save_sharded: the save to 'there' failed: the disk is gone\n"
    assert (told in found.stderr) == (how == "fails")
