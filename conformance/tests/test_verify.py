"""Checking reports by running a sample again."""

from __future__ import annotations

import pytest

from torchparts_conformance import _cli, _report, _verify

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
