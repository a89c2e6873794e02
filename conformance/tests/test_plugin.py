"""Runs of a small suite: outcomes, verdicts, options and invalid adapters."""

from __future__ import annotations

import pytest
from small_suite import declared


def test_right_implementation_is_conformant(suite):
    result = suite.run()
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        [
            "*= conformance =*",
            "ckpt-wrap * conformant: core 1 of 1",
            "beside it; these are torchparts' own requirements, and no part of the verdict:",
            "ckpt-wrap * robust 0 of 0 (SHOULD 1 of 1); in-place 1 of 1",
        ]
    )
    assert suite.outcomes() == {"CW-001": "pass", "CW-002": "pass", "CW-003": "pass"}
    written = {path.name for path in (suite.root / "out").iterdir()}
    assert written == {"report.json", "summary.txt", "badge-ckpt-wrap.svg"}


def test_listing_cases_writes_no_report(suite):
    result = suite.run("--collect-only", "-q")
    assert result.ret == 0
    assert "test_cases.py::test_one" in result.stdout.str()
    assert not (suite.root / "out").exists()


def test_plugin_is_silent_without_an_implementation(pytester):
    pytester.makepyfile("def test_fine():\n    pass\n")
    result = pytester.runpytest_inprocess("-p", "torchparts_conformance.plugin")
    assert result.ret == 0
    result.stdout.no_fnmatch_line("*= conformance =*")


@pytest.mark.parametrize(
    ("body", "outcome"),
    [
        ("assert part.answer == 43", "fail"),
        ("pytest.fail('no')", "fail"),
        ("raise RuntimeError('no')", "error"),
        ("pytest.skip('no')", "error"),
        ("pytest.xfail('no')", "error"),
        ("pytest.importorskip('no_such_module')", "error"),
        ("import unittest; raise unittest.SkipTest('no')", "error"),
    ],
)
def test_outcome_of_a_case(suite, body, outcome):
    suite.write_case(body)
    assert suite.run().ret == 1
    assert suite.outcomes()["CW-001"] == outcome


@pytest.mark.parametrize(
    "mark", ["skip(reason='no')", "xfail(reason='no')", "skipif(True, reason='')"]
)
def test_mark_on_a_case_is_an_error(suite, mark):
    cases = suite.root / "cases/ckpt_wrap/test_cases.py"
    text = cases.read_text().replace("def test_one", f"@pytest.mark.{mark}\ndef test_one")
    suite.write("cases/ckpt_wrap/test_cases.py", text.replace("== 42", "== 41", 1))
    assert suite.run().ret == 1
    assert suite.outcomes()["CW-001"] == "error"


def test_case_that_does_not_end_is_an_error(suite):
    body = "while True:\n        try:\n            while True: continue"
    body += "\n        except Exception: continue"
    suite.write_case(body, and_two=True)
    assert suite.run("--case-limit=0.3").ret == 1
    assert suite.outcomes() == {"CW-001": "error", "CW-002": "pass"}
    reason = suite.report()["rows"][0]["reason"]
    assert reason.endswith("but it raised OutOfTime: took more than 0.3 s")


def test_failure_names_its_place_and_no_folder_of_the_machine(suite):
    text = "/home/me/env/lib/case.py of https://example.org/a/b at 0x7f12"
    suite.write(
        "adapter.py",
        (suite.root / "adapter.py").read_text()
        + f"""
class Part:
    @property
    def answer(self):
        raise RuntimeError({text!r})

bad = Implementation("bad", "1", parts={{"ckpt-wrap": Part()}})
""",
    )
    suite.run(impl="adapter:bad")
    row = suite.report()["rows"][0]
    came = "but it raised RuntimeError: case.py of https://example.org/a/b at 0x..."
    assert row["reason"] == f"expected `part.answer == 42` to pass, {came}"
    case, adapter = row["where"].split(" > ")
    assert case.startswith("ckpt_wrap/test_cases.py:")
    assert "/adapter.py:" in adapter


@pytest.mark.parametrize(
    ("profile", "run"),
    [
        (None, {"CW-001"}),
        ("core", {"CW-001"}),
        ("in-place", {"CW-001", "CW-003"}),
        ("all", {"CW-001", "CW-002", "CW-003"}),
    ],
)
def test_profiles_that_are_run_beside_core(suite, profile, run):
    """Without the option, those that the adapter claims; this one claims none."""
    options = ["--profile", profile] if profile else []
    assert suite.run(*options, impl="adapter:plain").ret == 0
    outcomes = suite.outcomes()
    assert {id for id, outcome in outcomes.items() if outcome == "pass"} == run
    assert {outcome for id, outcome in outcomes.items() if id not in run} <= {"not_claimed"}
    said = (suite.root / "out/summary.txt").read_text()
    assert ("own requirements were not run; add --profile all" in said) == (run == {"CW-001"})


def test_own_requirement_that_fails_changes_the_exit_code_and_not_the_verdict(suite):
    suite.write_cases(three="assert part.answer == 41")
    assert suite.run().ret == 1
    assert suite.report()["verdict"] == "conformant"
    assert suite.run("--profile", "core").ret == 0


def test_area_that_is_not_provided_does_not_count(suite):
    more = f"from torchparts_conformance import requirement\n{declared('MT-001')}\n"
    suite.write("cases/mod_tracker/test_more.py", f"{more}def test_a(part):\n    assert part.x\n")
    assert suite.run("--area", "ckpt-wrap,mod-tracker").ret == 0
    assert suite.outcomes()["MT-001"] == "not_provided"
    assert "not provided: mod-tracker" in (suite.root / "out/summary.txt").read_text()


def test_cases_that_were_left_out_are_not_run(suite):
    assert suite.run("-k", "test_two").ret == 1
    assert suite.outcomes() == {"CW-001": "not_run", "CW-002": "pass", "CW-003": "not_run"}
    assert suite.report()["verdict"] == "not conformant"


def test_file_of_cases_that_cannot_be_imported_is_a_problem(suite):
    cases = suite.root / "cases/ckpt_wrap/test_cases.py"
    cases.write_text("import no_such_module\n" + cases.read_text())
    assert suite.run("--continue-on-collection-errors").ret == 1
    (problem,) = suite.report()["problems"]
    assert "test_cases.py cannot be imported: ModuleNotFoundError: No module" in problem


def test_no_device_is_its_own_exit_code(suite, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert suite.run("--device", "cuda").ret == 3
    assert {row["outcome"] for row in suite.report()["rows"]} == {"no_device"}
    assert "not run | cuda" in (suite.root / "out/badge-ckpt-wrap.svg").read_text()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--impl", "nobody"], "implementation 'nobody' is unknown"),
        (["--area", "wheels"], "--area 'wheels' is unknown"),
        (["--impl", "no_such:thing"], "importing 'no_such:thing' raised ModuleNotFoundError"),
        (["--impl", "adapter:nothing"], "has no attribute 'nothing'"),
        (["--impl", "adapter:types"], "is a module; it must be an Implementation"),
        (["--impl", "adapter:empty"], "'empty' does not provide 'ckpt-wrap'"),
        (["--device", "tpu"], "--device 'tpu' is unknown"),
        (["--profile", "speed"], "--profile 'speed' is unknown. Known are core, in-place"),
        (["--case-limit", "nan"], "--case-limit must be above 0 and at most"),
        (["--case-limit", "0"], "--case-limit must be above 0 and at most"),
        (["--known-failures", "none.toml"], "known failures 'none.toml' cannot be read: No such"),
    ],
)
def test_bad_option_is_one_line_and_exit_code_4(suite, options, words):
    result = suite.run(*options)
    assert result.ret == 4
    assert words in result.stderr.str()
    assert "Traceback" not in result.stderr.str() + result.stdout.str()


STRANGE = """
import pytest
from torchparts_conformance import Implementation

lost = Implementation("lost", "1", parts={"ckpt-wrap": "no_such_part"})
claims = Implementation("c", "1", parts={"ckpt-wrap": 1}, capabilities={"ckpt-wrap": {"speed"}})

def skips():
    pytest.skip("not today")

def leaves():
    raise SystemExit(0)

def old():
    return Implementation("old", "1", protocol="0")
"""


@pytest.mark.parametrize(
    ("adapter", "said"),
    [
        ("lost", "part 'ckpt-wrap' of 'lost': importing 'no_such_part' raised ModuleNot"),
        ("skips", "implementation 'strange:skips' raised Skipped: not today"),
        ("leaves", "implementation 'strange:leaves' raised SystemExit: 0"),
        ("old", "protocol is '0'; this suite has '1'"),
        ("claims", "implementation 'c' claims 'speed' for ckpt-wrap. Its profiles are core"),
    ],
)
def test_bad_adapter_is_one_line_and_exit_code_4(suite, adapter, said):
    suite.write("strange.py", STRANGE)
    result = suite.run(impl=f"strange:{adapter}")
    assert result.ret == 4
    assert said in result.stderr.str()
    assert "Traceback" not in result.stderr.str() + result.stdout.str()


def test_wrong_decorator_ends_a_run_with_one_line(suite):
    cases = suite.root / "cases/ckpt_wrap/test_cases.py"
    cases.write_text(cases.read_text().replace("It MUST", "It MAY", 1))
    result = suite.run()
    assert result.ret == 4
    assert (
        "ckpt_wrap/test_cases.py:4 requirement CW-001: the text must contain MUST or SHOULD"
        in result.stderr.str()
    )
