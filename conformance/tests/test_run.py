"""A run: what was left out, stopped or changed is in its report, and is not conformant."""

from __future__ import annotations

import contextlib

import pytest


@pytest.mark.parametrize(
    "options",
    [
        ["-k", "test_one"],
        ["-k", "not test_one"],
        ["--deselect", "cases/ckpt_wrap/test_cases.py::test_one[cpu]"],
        ["-m", "nothing"],
    ],
)
def test_selection_is_not_conformant(suite, options):
    """What was selected away is not run, and what is not run is not conformant."""
    assert suite.run(*options).ret == 1
    assert "not_run" in suite.outcomes().values()
    assert "brightgreen" not in (suite.root / "out/badge-ckpt-wrap.json").read_text()


def test_stopping_early_is_not_conformant(suite):
    """After the first failure of `-x`, the rest was not run."""
    cases = suite.root / "cases/ckpt_wrap/test_cases.py"
    suite.write("cases/ckpt_wrap/test_cases.py", cases.read_text().replace("== 42", "== 41", 1))
    assert suite.run("-x").ret == 1
    assert suite.outcomes() == {"CW-001": "fail", "CW-002": "not_run", "CW-003": "not_run"}


def test_node_id_is_not_conformant(suite):
    """Naming one case leaves the others not run: a complete run has every case of the area."""
    path = "cases/ckpt_wrap/test_cases.py::test_one"
    options = ["--impl=adapter:good", "--area=ckpt-wrap", "--rootdir=.", "--out=out"]
    suite.pytester.runpytest_inprocess("-p", "torchparts_conformance.plugin", *options, path)
    assert suite.report()["verdict"] == "not conformant"
    assert suite.outcomes()["CW-002"] == "not_run"


def test_exit_in_the_implementation_is_not_conformant(suite):
    """An implementation that ends pytest leaves cases not run."""
    suite.write_case("pytest.exit('bye', returncode=0)")
    assert suite.run().ret == 1
    assert suite.outcomes()["CW-001"] == "not_run"


def test_interrupt_is_not_conformant(suite):
    """After Ctrl-C there is a report, and what did not run is in it."""
    suite.write_case("raise KeyboardInterrupt", and_two=True)
    with contextlib.suppress(KeyboardInterrupt):
        suite.run()
    assert set(suite.outcomes().values()) == {"not_run"}
    assert suite.report()["verdict"] == "not conformant"


def test_mutant_report_is_never_conformant(suite):
    """A run with a fault put in cannot be mistaken for one without."""
    suite.write(
        "faults.py",
        "from torchparts_conformance.mutants import mutant, overlay\n"
        "@mutant(area='ckpt-wrap', kills={'CW-001', 'CW-002', 'CW-003'})\n"
        "def wrong(part):\n"
        "    '''Answers wrongly.'''\n"
        "    return overlay(part, answer=41)\n",
    )
    assert suite.run(f"--mutant={suite.root / 'faults.py'}::wrong").ret == 1
    assert set(suite.outcomes().values()) == {"fail"}
    assert suite.report()["problems"] == ["the implementation was broken by wrong"]
