"""Reports: verdicts by part and profile, known failures, and reading edited reports."""

from __future__ import annotations

import json

import pytest

from torchparts_conformance import _known_failures, _report
from torchparts_conformance._errors import ReportError


def _verdict(report, profile="core", device="cpu"):
    (found,) = (v for v in report["verdicts"] if v["profile"] == profile and v["device"] == device)
    return found


@pytest.mark.parametrize(
    ("outcome", "core", "verdict", "code"),
    [
        ("pass", "conformant", "conformant", 0),
        ("fail", "not conformant", "not conformant", 1),
        ("error", "not conformant", "not conformant", 1),
        ("xfail", "not conformant", "announced failures", 0),
        ("xpass", "not conformant", "not conformant", 1),
        ("not_run", "not conformant", "not conformant", 1),
        ("not_provided", "not provided", "not provided", 0),
        ("not_claimed", "not claimed", "not provided", 0),
        ("no_device", "no device", "no device", 3),
    ],
)
def test_verdict_is_about_core_and_the_exit_code_about_everything(
    make_report, outcome, core, verdict, code
):
    report = make_report({"CW-001": outcome})
    assert _verdict(report)["verdict"] == core
    assert (report["verdict"], _report.exit_code(report)) == (verdict, code)


def test_should_that_fails_is_counted_and_does_not_block(make_report):
    report = make_report({"CW-002": "fail"})
    assert _verdict(report, "robust")["should"] == [0, 1]
    assert report["verdict"] == "conformant"


def test_problem_of_the_run_blocks_every_profile(make_report):
    report = make_report(problems=("odd",))
    assert {v["verdict"] for v in report["verdicts"]} == {"not conformant"}
    assert _report.exit_code(report) == 1


def test_nothing_provided_is_not_conformant(make_report):
    ids = ("CW-001", "CW-002", "CW-003")
    assert make_report(dict.fromkeys(ids, "not_provided"))["verdict"] == "not provided"


def test_counts_name_what_is_not_provided():
    verdict = {"profile": "core", "must": [3, 4], "not_provided": 2}
    assert _report.counts_of(verdict) == "core 3 of 4 (2 not provided)"
    assert _report.counts_of({**verdict, "not_provided": 0}) == "core 3 of 4"


def test_requirement_has_the_worst_outcome_of_its_cases():
    assert _report.worst(["pass", "not_provided"]) == "not_provided"
    assert _report.worst(["not_provided", "fail", "pass"]) == "fail"
    assert _report.worst(["pass", "pass"]) == "pass"


def test_reports_of_shares_are_merged(make_report):
    one = make_report({"CW-001": "not_run"}, problems=("odd",))
    two = make_report({"CW-001": "fail", "CW-002": "not_run", "CW-003": "not_run"})
    merged = _report.merged([one, two])
    assert [row["outcome"] for row in merged["rows"]] == ["fail", "pass", "pass"]
    assert merged["problems"] == ["odd"]


def test_report_reads_back(stored, make_report):
    assert _report.read(stored()) == make_report()


def _edit(path, change):
    report = json.loads(path.read_text())
    change(report)
    path.write_text(json.dumps(report))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda r: r.update(format="x"), "is not a report of this suite"),
        (lambda r: r.update(suite="9"), "is of suite '9'; installed is"),
        (lambda r: r.pop("claims"), "is incomplete or has the wrong form: KeyError 'claims'"),
        (lambda r: r["rows"][0].update(outcome="great"), "an unknown outcome"),
        (lambda r: r["rows"][0].update(id="CW-999"), "CW-999 is not a requirement of this suite"),
        (lambda r: r["rows"][0].update(outcome="fail"), "verdicts do not follow from its rows"),
        (lambda r: r["verdicts"][0].update(must=[9, 9]), "verdicts do not follow from its rows"),
        (lambda r: r["implementation"].clear(), "the implementation lacks name"),
    ],
)
def test_edited_report_is_refused(stored, change, said):
    path = stored()
    _edit(path, change)
    with pytest.raises(ReportError, match=said):
        _report.read(path)


@pytest.mark.parametrize("text", ["", "{", "[" * 10000, "[]", "nul\0"])
def test_file_that_is_no_report_is_refused(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ReportError, match=r"report 'x\.json' is no"):
        _report.read(tmp_path / "x.json")


def test_file_that_is_missing_large_or_no_text_is_refused(tmp_path):
    (tmp_path / "large").write_text("x" * 11)
    (tmp_path / "binary").write_bytes(b"\xff")
    said = [("none", "cannot be read: No such"), ("", "is not a regular file")]
    said += [("large", "is larger than 10 bytes"), ("binary", "cannot be read: 'utf-8'")]
    for name, words in said:
        with pytest.raises(ReportError, match=words):
            _report.read_text(tmp_path / name, role="file", max_bytes=10)


GOOD = {
    "id": '"CW-001"',
    "devices": '["cpu"]',
    "reason": '"it is being fixed"',
    "issue": '"https://example.org/7"',
    "expires": "2999-01-01",
}


def _known(folder, **changes):
    lines = [f"{key} = {value}" for key, value in {**GOOD, **changes}.items() if value]
    path = folder / "known.toml"
    path.write_text("\n".join(["[[known_failure]]", *lines]), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"reason": None}, "missing 1 required"),
        ({"colour": '"red"'}, "unexpected keyword argument 'colour'"),
        ({"devices": '["Cuda"]'}, r"devices of CW-001 is \['Cuda'\]"),
        ({"devices": "[]"}, r"devices of CW-001 is \[\]"),
        ({"reason": '" "'}, "id and reason must be non-empty text"),
        ({"issue": '"http://x.org"'}, "it must be an https address"),
        ({"expires": '"2999-01-01"'}, "write a date such as 2027-03-01"),
        ({"expires": "["}, "known failures 'known.toml': "),
    ],
)
def test_bad_known_failure_is_refused(tmp_path, changes, said):
    with pytest.raises(ReportError, match=said):
        _known_failures.load(_known(tmp_path, **changes))


@pytest.mark.parametrize(
    ("outcomes", "become", "problem"),
    [
        (["fail", "pass"], ["xfail", "pass"], ""),
        (["fail", "error"], ["xfail", "error"], ""),
        (["pass", "pass"], ["xpass", "xpass"], "did not fail (pass)"),
        (["pass", "error"], ["xpass", "error"], "did not fail (error, pass)"),
    ],
)
def test_requirement_is_announced_and_not_a_case(tmp_path, outcomes, become, problem):
    rows = [{"id": "CW-001", "device": "cpu", "outcome": outcome} for outcome in outcomes]
    other = [{"id": "CW-001", "device": "cuda", "outcome": "pass"}]
    found, problems = _known_failures.announce(
        [*rows, *other], _known_failures.load(_known(tmp_path))
    )
    assert [row["outcome"] for row in found] == [*become, "pass"]
    assert [problem in text for text in problems] == ([True] if problem else [])


@pytest.mark.parametrize(
    ("changes", "code", "outcome", "said"),
    [
        ({}, 0, "xfail", ""),
        ({"expires": "2020-01-01"}, 1, "xfail", "expired on 2020-01-01"),
        ({"id": '"CW-003"'}, 1, "fail", "did not fail (pass)"),
        ({"id": '"CW-777"'}, 1, "fail", "no such requirement was run"),
    ],
)
def test_known_failure_has_to_be_true(suite, changes, code, outcome, said):
    suite.write_cases(one="assert part.answer == 41")
    assert suite.run("--known-failures", str(_known(suite.root, **changes))).ret == code
    assert suite.outcomes()["CW-001"] == outcome
    assert said in " ".join(suite.report()["problems"])


def test_announced_crash_stays_an_error(suite):
    suite.write_case("raise RuntimeError('no')")
    assert suite.run("--known-failures", str(_known(suite.root))).ret == 1
    assert suite.outcomes()["CW-001"] == "error"
