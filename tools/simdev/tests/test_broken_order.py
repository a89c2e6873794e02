"""Offloads that forget a wait, an owner or a version are caught by what they declare, alone."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

mutants = pytest.importorskip("torchparts_conformance.mutants")

HERE = Path(__file__).resolve().parent.parent
Nursery = runpy.run_path(str(HERE.parent / "selftest/nursery.py"))["Nursery"]
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
SIMDEV = [sys.executable, "-m", "simdev"]
RUN = ["-m", "pytest", "-p", "torchparts_conformance.plugin", "-p", "no:cacheprovider"]
RUN += ["--pyargs", "torchparts_conformance.cases", "--device", "simdev"]
COLLECT = f"""
import pytest
pytest.main({[*RUN[2:], "--impl", "torch", "--collect-only", "-qq"]})
from torchparts_conformance.subject._ranks import shared_pool
shared_pool().close()
shared_pool.cache_clear()  # each run has its own
"""
FILES = {area: HERE / "mutants" / f"{area.replace('-', '_')}_order.py" for area in PROFILES}
BROKEN = [
    (area, found.name) for area, file in FILES.items() for found in mutants.find_mutants(file)
]


@pytest.fixture(scope="module")
def nursery():
    """Give what has collected all cases on the simulated device, and runs some of them in a fork.

    They are collected for torch's implementation: when ours is imported it looks what a backward
    does, and the threads of one are in no fork.
    """
    found = Nursery("-c", COLLECT, python=SIMDEV)
    yield found
    found.close()


@pytest.fixture
def failed(nursery, tmp_path):
    """Run an area's cases; gives ids that fail on the simulated device, and those that pass."""

    def run(area, *options):
        out, said = tmp_path / "out", tmp_path / "said"
        asked = ["-q", "--impl", "ours", "-k", CASES.get(area, "test_offload"), "--area", area]
        asked += ["--profile", PROFILES[area], "--out", str(out)]
        nursery.run(*RUN, *asked, *options, said=said)
        report = out / "report.json"
        assert report.exists(), said.read_text()
        rows = json.loads(report.read_text(encoding="utf-8"))["rows"]
        bad = {row["id"] for row in rows if row["outcome"] in ("fail", "error")}
        return bad, {row["id"] for row in rows if row["outcome"] == "pass"} - bad

    return run


@pytest.mark.parametrize(
    ("area", "wanted"),
    [
        ("ckpt-wrap", {f"CW-{number}" for number in range(112, 119)}),
        ("sac-policies", {"SP-178", "SP-200", "SP-201", "SP-206", "SP-207", "SP-208"}),
        ("flat-param", {"FP-234", "FP-235", "FP-236", "FP-245", "FP-246", "FP-247"}),
        ("mod-tracker", {"MT-431"}),
    ],
)
def test_offload_as_it_is_fails_nothing(failed, area, wanted):
    """Or what the others fail would say nothing."""
    bad, good = failed(area)
    assert bad == set()
    assert good >= wanted


@pytest.mark.parametrize(("area", "name"), BROKEN)
def test_a_broken_offload_is_caught_as_declared(failed, area, name):
    """No more and no less fails than it says."""
    declared = mutants.load_mutant(f"{FILES[area]}::{name}").kills
    bad, _ = failed(area, "--mutant", f"{FILES[area]}::{name}")
    assert bad == declared
