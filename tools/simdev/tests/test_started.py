"""`python -m simdev`: the device in other programs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import subprocess, sys, torch
print(torch.accelerator.current_accelerator())
if len(sys.argv) == 1:
    subprocess.run([sys.executable, __file__, "child"], check=True)
"""


def test_a_process_and_its_children_have_the_device(tmp_path):
    """Without changes in the program."""
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    command = [sys.executable, "-m", "simdev", str(file)]
    told = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert told.stdout.split() == ["simdev", "simdev"], told.stderr
