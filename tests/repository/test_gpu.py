"""The command for a machine with an accelerator runs, ends, judges and writes what it says."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / ".ci" / "gpu.py"


@pytest.fixture(scope="module")
def gpu() -> ModuleType:
    """Import the script."""
    spec = importlib.util.spec_from_file_location("gpu", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_tests_of_each_defect_are_there(gpu):
    """A defect whose test was renamed would be "not run" for ever."""
    texts = "\n".join(path.read_text() for path in ROOT.glob("packages/*/tests/test_*.py"))
    specs = "\n".join(path.read_text() for path in (ROOT / "conformance/src").rglob("spec/*.toml"))
    for defect in (*gpu.DEFECTS.values(), *gpu.TABLES.values()):
        assert defect.tests or defect.requirements
        assert [name for name in defect.tests if f"def {name}(" not in texts] == []
        assert [id for id in defect.requirements if f"[{id}]" not in specs] == []


def test_files_that_are_run_are_there(gpu, tmp_path):
    """Each part's script or folder of tests, and no name twice."""
    chosen = list(gpu.parts("cuda", tmp_path))
    names = [word for part in chosen for word in part.command if "/" in word and "=" not in word]
    assert [
        name for name in names if not (ROOT / name).exists() and str(tmp_path) not in name
    ] == []
    assert len({part.name for part in chosen}) == len(chosen)


@pytest.mark.parametrize(
    ("found", "says"),
    [
        ({"test_a": ["pass", "pass"], "X-1": ["pass"]}, "gone (3 cases)"),
        (
            {"test_a": ["pass", "skipped, two devices"], "X-1": ["pass"]},
            "gone (2 cases, 1 not run)",
        ),
        ({"test_a": ["skipped, two devices"]}, "not run: two devices"),
        ({"test_a": ["pass", "fail"], "X-1": ["pass"]}, "still there"),
        ({"test_a": ["pass"], "X-1": ["error"]}, "still there"),
        ({}, "not run: not run"),
    ],
)
def test_defect_is_gone_where_its_tests_ran_and_passed(gpu, found, says):
    """Never because they did not run."""
    assert gpu.verdict(gpu.Defect("", ("test_a",), ("X-1",)), found) == says


def test_outcomes_are_read_from_pytest_and_from_the_report(gpu, tmp_path):
    """Parameters of one test are joined under its name."""
    (tmp_path / "a.xml").write_text(
        '<testsuites><testsuite><testcase name="test_a[1]"/><testcase name="test_a[2]"><failure/>'
        '</testcase><testcase name="test_b"><skipped message="two devices"/></testcase>'
        "</testsuite></testsuites>"
    )
    (tmp_path / "conformance").mkdir()
    rows = {"rows": [{"id": "X-1", "outcome": "no_device"}]}
    (tmp_path / "conformance" / "report.json").write_text(json.dumps(rows))
    found = {"test_a": ["pass", "fail"], "test_b": ["skipped, two devices"], "X-1": ["no_device"]}
    assert gpu.seen(tmp_path) == found


@pytest.mark.parametrize(
    ("code", "outcome"),
    [("", "passed"), ("exit(5)", "nothing is marked"), ("import time; time.sleep(60)", "ended")],
)
def test_part_is_run_with_the_sources_until_the_limit(gpu, tmp_path, code, outcome):
    """Its output is in a log of its name."""
    part = gpu.Part("one part", ("-c", f"import ckpt_wrap, sys; print('hello'); {code}"))
    limit_s = 60.0 if outcome != "ended" else 3.0
    ended = gpu.run(part, tmp_path, time.monotonic() + limit_s)
    assert ended.outcome.startswith(outcome)
    assert (tmp_path / "one-part.log").read_text().startswith("hello" if outcome != "ended" else "")


def test_page_has_every_part_and_defect(gpu):
    """With what it came to."""
    ended = [gpu.Ended("conformance", "failed (1)", 61.4)]
    defects, tables = dict.fromkeys(gpu.DEFECTS, "gone"), dict.fromkeys(gpu.TABLES, "confirmed")
    text = gpu.page({"driver": "1.2"}, ended, defects, tables)
    assert "- **driver**: 1.2\n" in text
    assert "| conformance | failed (1) | 61 |\n" in text
    assert text.count("| gone |\n") == 9
    assert text.count("| confirmed |\n") == len(gpu.TABLES)


def test_table_is_confirmed_where_its_requirements_ran_and_passed(gpu):
    """And said not to be so where one of them failed."""
    table = gpu.Defect("", requirements=("X-1", "X-2"))
    found = {"X-1": ["pass"], "X-2": ["no_device"]}
    assert gpu.verdict(table, found, gpu.HELD) == "confirmed (1 cases, 1 not run)"
    assert gpu.verdict(table, {"X-1": ["pass"], "X-2": ["fail"]}, gpu.HELD) == "not so"


def test_every_broken_order_is_asked_of_a_real_device_too(gpu):
    """Each requirement about streams that has a broken implementation on the simulated device."""
    mutants = (ROOT / "conformance/simdev/mutants").glob("*.py")
    declared = {id for path in mutants for id in re.findall(r'"([A-Z]{2}-\d+)"', path.read_text())}
    asked = {id for table in gpu.TABLES.values() for id in table.requirements}
    assert declared
    assert declared <= asked


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_machine_without_it_is_refused(tmp_path):
    """Nothing is run, and the error says so."""
    command = [sys.executable, str(SCRIPT), str(tmp_path / "out")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "cuda asked for, but this machine has no accelerator: nothing was run" in ended.stderr
    assert not (tmp_path / "out").exists()
