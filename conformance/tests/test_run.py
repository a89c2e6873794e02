"""A run: what was left out, stopped or changed is in its report, and is not conformant."""

from __future__ import annotations

import contextlib

import pytest

from torchparts_conformance.verify import _verify


def test_frozen_row_of_a_lost_requirement_is_exit_code_4(suite):
    """A requirement that was taken out is missed, though every case that is left passes."""
    spec, cases = suite.root / "spec/ckpt_wrap.toml", suite.root / "cases/ckpt_wrap/test_cases.py"
    head, _, tail = spec.read_text().partition("[CW-002]")
    spec.write_text(head + "[CW-003]" + tail.partition("[CW-003]")[2])
    first, _, rest = cases.read_text().partition('@requirement("CW-002")')
    cases.write_text(first + '@requirement("CW-003")' + rest.partition('@requirement("CW-003")')[2])
    result = suite.run()
    assert result.ret == 4
    said = result.stderr.str()
    assert "the frozen list has CW-002 (ckpt_wrap/test_cases.py::test_two), but no such" in said


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
    suite.freeze()
    assert suite.run("-x").ret == 1
    assert suite.outcomes() == {"CW-001": "fail", "CW-002": "not_run", "CW-003": "not_run"}


def test_node_id_is_not_conformant(suite):
    """Naming one case leaves the others not run, because the frozen list has them."""
    path = "cases/ckpt_wrap/test_cases.py::test_one"
    options = ["--impl=adapter:good", "--area=ckpt-wrap", "--rootdir=.", "--out=out"]
    suite.pytester.runpytest_inprocess("-p", "torchparts_conformance.plugin", *options, path)
    assert suite.report()["verdict"] == "not conformant"
    assert suite.outcomes()["CW-002"] == "not_run"


def test_exit_in_the_implementation_is_not_conformant(suite):
    """An implementation that ends pytest leaves cases not run."""
    suite.write_case("pytest.exit('bye', returncode=0)")
    suite.freeze()
    assert suite.run().ret == 1
    assert suite.outcomes()["CW-001"] == "not_run"


def test_interrupt_is_not_conformant(suite):
    """After Ctrl-C there is a report, and what did not run is in it."""
    suite.write_case("raise KeyboardInterrupt", and_two=True)
    suite.freeze()
    with contextlib.suppress(KeyboardInterrupt):
        suite.run()
    assert set(suite.outcomes().values()) == {"not_run"}
    assert suite.report()["verdict"] == "not conformant"


@pytest.mark.parametrize("name", ["spec/ckpt_wrap.toml", "lock.json"])
def test_edited_requirement_or_list_is_not_conformant(suite, name):
    """A softened requirement, or a row taken off the frozen list, shows in the report."""
    path = suite.root / name
    text = path.read_text()
    row = '  [\n   "CW-002",\n   "ckpt_wrap/test_cases.py::test_two"\n  ],\n'
    assert row in text or 'level = "SHOULD"' in text
    text = text.replace(row, "").replace('level = "SHOULD"', 'level = "MAY"')
    path.write_text(text.replace("It SHOULD hold", "It MAY hold"))
    assert suite.run().ret == 1
    assert suite.report()["suite"]["frozen"] is False


def test_consistently_edited_list_is_another_suite(suite, frozen, registry):
    """Who takes a case away and freezes again has another suite, and the genuine one refuses it."""
    suite.run()
    genuine = suite.report()["suite"]["manifest_sha256"]
    cases = suite.root / "cases/ckpt_wrap/test_cases.py"
    head, one, _, three = cases.read_text().split("@requirement")
    cases.write_text(f"{head}@requirement{one}@requirement{three}")
    suite.freeze()
    assert suite.run().ret == 0
    forged = suite.report()
    assert forged["suite"]["manifest_sha256"] != genuine
    expected = _verify.Expected("0.1.0", frozen, registry)
    (said,) = (text for text in _verify.problems(forged, None, expected) if "manifest" in text)
    assert said == (
        "the manifest is not the one of this suite: install torchparts-conformance 0.1.0, which "
        "wrote the report, from where it was had, or run again with 0.1.0"
    )


def test_changed_case_is_not_conformant(suite):
    """A suite that is not the frozen one proves nothing, though all passes."""
    cases = suite.root / "cases/ckpt_wrap/test_cases.py"
    suite.write("cases/ckpt_wrap/test_cases.py", cases.read_text().replace("== 42", "!= 0"))
    assert suite.run().ret == 1
    assert set(suite.outcomes().values()) == {"pass"}
    assert suite.report()["suite"]["frozen"] is False


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
    assert suite.report()["suite"]["frozen"] is False
