"""Offloads that forget a wait, an owner or a version are caught by what they declare, alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

mutants = pytest.importorskip("torchparts_conformance.mutants")

HERE = Path(__file__).resolve().parent.parent
FILE = HERE / "mutants" / "ckpt_wrap_order.py"
NAMES = [found.name for found in mutants.find_mutants(FILE)]


def failed(tmp_path, *options):
    """Ids that fail on the simulated device, and those that were run."""
    out = tmp_path / "out"
    plugin = ["-m", "pytest", "-p", "torchparts_conformance.plugin", "-p", "no:cacheprovider"]
    cases = ["--pyargs", "torchparts_conformance.cases", "-k", "test_offload", "-q"]
    run = ["--impl", "ours", "--area", "ckpt-wrap", "--profile", "offload", "--device", "simdev"]
    command = [sys.executable, "-m", "simdev", *plugin, *cases, *run, "--out", str(out), *options]
    ran = subprocess.run(
        command, cwd=HERE, capture_output=True, text=True, timeout=300, check=False
    )
    report = out / "report.json"
    assert report.exists(), ran.stdout + ran.stderr
    rows = json.loads(report.read_text(encoding="utf-8"))["rows"]
    bad = {row["id"] for row in rows if row["outcome"] in ("fail", "error")}
    return bad, {row["id"] for row in rows if row["outcome"] == "pass"} - bad


def test_offload_as_it_is_fails_nothing(tmp_path):
    """Or what the others fail would say nothing."""
    bad, good = failed(tmp_path)
    assert bad == set()
    assert good >= {"CW-112", "CW-113", "CW-114", "CW-115", "CW-116"}


@pytest.mark.parametrize("name", NAMES)
def test_a_broken_offload_is_caught_as_declared(tmp_path, name):
    """No more and no less fails than it says."""
    declared = mutants.load_mutant(f"{FILE}::{name}").kills
    bad, _ = failed(tmp_path, "--mutant", f"{FILE}::{name}")
    assert bad == declared
