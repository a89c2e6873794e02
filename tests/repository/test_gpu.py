"""The script for a machine with an accelerator: its parts, and its time limit."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tools/release/gpu.py"


@pytest.fixture(scope="module")
def gpu(load):
    """Import the script."""
    return load("release/gpu")


def test_files_that_are_run_are_there(gpu, tmp_path):
    """Each part's script or test folder exists, and names are unique."""
    chosen = list(gpu.parts("cuda", tmp_path))
    names = [word for part in chosen for word in part.command if "/" in word and "=" not in word]
    assert [
        name for name in names if not (ROOT / name).exists() and str(tmp_path) not in name
    ] == []
    assert len({part.name for part in chosen}) == len(chosen)


@pytest.mark.parametrize(
    ("code", "outcome"),
    [("", "passed"), ("exit(5)", "nothing is marked"), ("import time; time.sleep(60)", "ended")],
)
def test_part_is_run_with_the_sources_until_the_limit(gpu, tmp_path, code, outcome):
    """Its output is in a log with its name."""
    part = gpu.Part("one part", ("-c", f"import ckpt_wrap, sys; print('hello'); {code}"))
    limit_s = 60.0 if outcome != "ended" else 3.0
    ended = gpu.run(part, tmp_path, time.monotonic() + limit_s)
    assert ended.outcome.startswith(outcome)
    assert (tmp_path / "one-part.log").read_text().startswith("hello" if outcome != "ended" else "")


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_machine_without_it_is_refused(tmp_path):
    """Without an accelerator nothing runs, and the error says so."""
    command = [sys.executable, str(SCRIPT), str(tmp_path / "out")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "cuda asked for, but this machine has no accelerator: nothing was run" in ended.stderr
    assert not (tmp_path / "out").exists()
