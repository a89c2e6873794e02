"""Checking reports against the suite, by running again."""

from __future__ import annotations

import json

import pytest

from torchparts_conformance import _badge, _cli, _report, _verify


def test_genuine_report_has_no_problems(make_report):
    report = make_report(devices=("cpu", "cuda"))
    (badge,) = _badge.badges(report)
    for text in (None, _badge.to_svg(badge), _badge.to_shields(badge)):
        assert _verify.problems(report, text) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda r: r["rows"].pop(),
            "row CW-003 ckpt_wrap/test_cases.py::test_three cpu is missing",
        ),
        (lambda r: r["rows"].append(r["rows"][0]), "a row occurs twice"),
        (lambda r: r["rows"][0].update(case="x::y"), "row CW-001 x::y cpu is not a case"),
        (
            lambda r: r["rows"][0].update(outcome="not_claimed"),
            "CW-001 cpu is of a claimed profile",
        ),
    ],
)
def test_report_that_the_suite_cannot_have_written_has_problems(make_report, change, said):
    report = make_report()
    change(report)
    assert any(said in text for text in _verify.problems(report))


def test_badge_of_another_report_is_refused(make_report, stored, tmp_path, capsys):
    (badge,) = _badge.badges(make_report())
    (tmp_path / "badge.svg").write_text(_badge.to_svg(badge))
    path = stored({"CW-001": "fail"})
    assert _cli.main(["verify", str(path), str(tmp_path / "badge.svg")]) == 1
    assert "the badge does not match this report" in capsys.readouterr().err


def test_report_is_verified_without_running_anything(stored, capsys):
    assert _cli.main(["verify", str(stored())]) == 0
    assert "nothing contradicts it. Nothing was run again: add --impl" in capsys.readouterr().out


LIAR = """
import types
from torchparts_conformance import Implementation

liar = Implementation("liar", "1", parts={"ckpt-wrap": types.SimpleNamespace(answer=41)})
"""


@pytest.fixture
def claimed(suite):
    """Write a report in which a failing implementation passes everything."""
    suite.write("liar.py", LIAR)
    suite.run(impl="liar:liar")
    report = suite.report()
    assert {row["outcome"] for row in report["rows"]} == {"fail", "not_claimed"}
    for row in report["rows"]:
        row["outcome"] = row["outcome"].replace("fail", "pass")
    facts = {word: report[word] for word in ("implementation", "environment", "claims")}
    forged = _report.build(**facts, rows=report["rows"], problems=[])
    _report.write(suite.root / "forged.json", _report.to_text(forged))
    return suite.root / "forged.json"


def test_report_that_claims_passes_is_caught_by_its_sample(claimed, suite, monkeypatch, capsys):
    asked = []

    def run_cases(options, *, jobs):
        asked.append(options)
        suite.run(*options, impl="liar:liar")
        return suite.report()

    monkeypatch.setattr(_verify, "run_cases", run_cases)
    assert _cli.main(["verify", str(claimed)]) == 0  # undetectable without running
    options = ["--impl", "liar:liar", "--sample", "1", "--seed", "3"]
    assert _cli.main(["verify", str(claimed), *options]) == 1
    said = capsys.readouterr()
    assert "is pass in the report, and fail now" in said.err
    assert "1 requirements were run again, with seed 3" in said.out
    assert asked[0][0].startswith("--requirement=CW-00")


def test_sample_is_random_but_repeatable(make_report):
    report = make_report({"CW-003": "not_claimed"})
    assert _verify.sample(report, 20, 1) == ["CW-001", "CW-002"]
    assert {tuple(_verify.sample(report, 1, seed)) for seed in range(20)} == {
        ("CW-001",),
        ("CW-002",),
    }


def test_report_is_json_that_others_can_read(stored):
    assert json.loads(stored().read_text())["verdicts"][0]["must"] == [1, 1]
