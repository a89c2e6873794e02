"""Processes that a run left behind are found, and ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from torchparts_conformance.subject import _leftovers

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

SLEEPS = "import time; time.sleep(600)"
PARENT = f"""
import subprocess, sys
with subprocess.Popen([sys.executable, "-c", {SLEEPS!r}]) as child:
    print(child.pid, flush=True)
"""
FAMILY = """
import os, subprocess, sys
from torchparts_conformance.subject import _leftovers

_leftovers.adopt()
sleep = "import time; time.sleep(600)"
starts = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {sleep!r}])"
lives = f"{starts}; print(flush=True); {sleep}"
child = subprocess.Popen([sys.executable, "-c", lives], stdout=subprocess.PIPE)
child.stdout.readline()
before = len(_leftovers._children())
_leftovers.end()
print(before, _leftovers._children(), child.poll() is not None)
"""


def test_children_are_those_of_this_process_alone():
    """Neither theirs, nor the process itself, nor its parent."""
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as child:
        grandchild = int(child.stdout.readline())
        try:
            found = _leftovers._children()
        finally:
            os.kill(grandchild, signal.SIGKILL)
            child.kill()
    assert child.pid in found
    assert not {grandchild, os.getpid(), os.getppid()} & set(found)
    assert child.pid not in _leftovers._children()


def test_children_and_theirs_are_ended():
    """A grandchild comes to the process that adopts, once its own parent has ended."""
    ended = subprocess.run(
        [sys.executable, "-c", FAMILY], capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout.split() == ["1", "[]", "True"]
