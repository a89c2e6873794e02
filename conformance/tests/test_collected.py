"""The cases that pytest collected: what each checks, and what could not be imported."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchparts_conformance.run._collected import Collected


def test_one_requirement_can_be_run_alone(suite):
    """Its cases run, its outcome is shown and decides, and nothing is said of the others."""
    cases = suite.root / "cases/ckpt_wrap/test_cases.py"
    suite.write("cases/ckpt_wrap/test_cases.py", cases.read_text().replace("== 42", "== 41", 1))
    good = suite.run("--requirement", "CW-002")
    assert good.ret == 0
    good.stdout.fnmatch_lines(["pass * ckpt_wrap/test_cases.py::test_two cpu: -"])
    bad = suite.run("--requirement", "CW-001")
    assert bad.ret == 1
    bad.stdout.fnmatch_lines(["fail * ckpt_wrap/test_cases.py::test_one cpu: AssertionError*"])
    assert "CW-003" not in bad.stdout.str()


def test_several_requirements_can_be_run_without_the_rest(suite):
    """With commas between their ids; each has to pass."""
    result = suite.run("--requirement", "CW-001,CW-002")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["pass * *test_one cpu: -", "pass * *test_two cpu: -"])
    assert "CW-003" not in result.stdout.str()


def test_file_of_cases_that_cannot_be_imported_is_said(suite):
    """Nothing runs then, and the end names the file and what was missing, not only what is lost."""
    suite.write("cases/ckpt_wrap/test_more.py", "import no_such_library\n")
    result = suite.run()
    assert result.ret == 1
    said = "test_more.py cannot be imported: ModuleNotFoundError: No module named 'no_such_library'"
    summary = result.stdout.str().partition("= conformance =")[2]
    assert f"ckpt_wrap/{said}" in summary
    assert set(suite.outcomes().values()) == {"not_run"}
    assert suite.report()["problems"] == [f"ckpt_wrap/{said}"]


def test_unknown_requirement_is_exit_code_4(suite):
    """A case that names a requirement that does not exist stops the run."""
    cases = suite.root / "cases/ckpt_wrap/test_cases.py"
    more = '@requirement("CW-999")\ndef test_more(part): ...\n'
    suite.write("cases/ckpt_wrap/test_cases.py", cases.read_text() + more)
    result = suite.run()
    assert result.ret == 4
    assert "test_cases.py::test_more checks CW-999, which no case declares" in result.stderr.str()


@pytest.mark.parametrize(
    ("why", "said"),
    [
        ("x.py:1: in <module>\nE   ValueError: a\nE   KeyError: b\nlast", "KeyError: b"),
        ("first\n  last \n\n", "last"),
        ("", "no reason is known"),
    ],
)
def test_file_that_could_not_be_imported_is_told_by_its_last_error(registry, why, said):
    """Without the lines that lead there, and by its last folder."""
    cases = Collected(registry)
    cases.broken(Path("/home/me/cases/ckpt_wrap/test_a.py"), why)
    assert cases.problems == [f"ckpt_wrap/test_a.py cannot be imported: {said}"]


def test_case_runs_only_on_devices_of_its_requirements(suite, monkeypatch):
    """On others it checks nothing, and is no row."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    suite.run("--device", "cpu,cuda")
    places = {(row["id"], row["device"]) for row in suite.report()["rows"]}
    assert places == {("CW-001", "cpu"), ("CW-001", "cuda"), ("CW-002", "cpu"), ("CW-003", "cpu")}
