"""Run the conformance suite in my-tracker's own tests: `python -m pytest`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

KNOWN = Path(__file__).with_name("known-failures.toml")


def test_conformance(tmp_path: Path) -> None:
    """Exit code 0: every failure is listed in `known-failures.toml`."""
    command = [sys.executable, "-m", "torchparts_conformance", "run", "--impl", "my-tracker"]
    command += ["--area", "mod-tracker"]
    command += ["--known-failures", str(KNOWN), "--out", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-1000:]
