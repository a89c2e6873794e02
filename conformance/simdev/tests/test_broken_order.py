"""Offloads that forget a wait, an owner or a version are caught by what they declare, alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

mutants = pytest.importorskip("torchparts_conformance.mutants")

HERE = Path(__file__).resolve().parent.parent
PROFILES = {
    "ckpt-wrap": "offload",
    "sac-policies": "budget",
    "flat-param": "distributed",
    "mod-tracker": "reports",
}
CASES = {
    "flat-param": "test_distributed_streams or test_distributed_backwards",
    "mod-tracker": "test_time_of_a_module",
}
FILES = {area: HERE / "mutants" / f"{area.replace('-', '_')}_order.py" for area in PROFILES}
BROKEN = [
    (area, found.name) for area, file in FILES.items() for found in mutants.find_mutants(file)
]


def failed(tmp_path, area, *options):
    """Ids that fail on the simulated device, and those that were run."""
    out = tmp_path / "out"
    plugin = ["-m", "pytest", "-p", "torchparts_conformance.plugin", "-p", "no:cacheprovider"]
    cases = ["--pyargs", "torchparts_conformance.cases", "-q"]
    cases += ["-k", CASES.get(area, "test_offload")]
    run = ["--impl", "ours", "--area", area, "--profile", PROFILES[area], "--device", "simdev"]
    command = [sys.executable, "-m", "simdev", *plugin, *cases, *run, "--out", str(out), *options]
    ran = subprocess.run(
        command, cwd=HERE, capture_output=True, text=True, timeout=300, check=False
    )
    report = out / "report.json"
    assert report.exists(), ran.stdout + ran.stderr
    rows = json.loads(report.read_text(encoding="utf-8"))["rows"]
    bad = {row["id"] for row in rows if row["outcome"] in ("fail", "error")}
    return bad, {row["id"] for row in rows if row["outcome"] == "pass"} - bad


@pytest.mark.parametrize(
    ("area", "wanted"),
    [
        ("ckpt-wrap", {f"CW-{number}" for number in range(112, 119)}),
        ("sac-policies", {"SP-178", "SP-200", "SP-201", "SP-206", "SP-207", "SP-208"}),
        ("flat-param", {"FP-234", "FP-235", "FP-236", "FP-245", "FP-246", "FP-247"}),
        ("mod-tracker", {"MT-431"}),
    ],
)
def test_offload_as_it_is_fails_nothing(tmp_path, area, wanted):
    """Or what the others fail would say nothing."""
    bad, good = failed(tmp_path, area)
    assert bad == set()
    assert good >= wanted


@pytest.mark.parametrize(("area", "name"), BROKEN)
def test_a_broken_offload_is_caught_as_declared(tmp_path, area, name):
    """No more and no less fails than it says."""
    declared = mutants.load_mutant(f"{FILES[area]}::{name}").kills
    bad, _ = failed(tmp_path, area, "--mutant", f"{FILES[area]}::{name}")
    assert bad == declared
