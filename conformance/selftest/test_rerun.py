"""Running again: what is installed, and what counts as different."""

from __future__ import annotations

import copy

import pytest

from torchparts_conformance import _rerun
from torchparts_conformance._errors import ReportError


def test_plan_pins_the_suite_torch_and_the_distribution(make_report):
    """Exactly the versions of the report are asked for."""
    plan = _rerun.install_plan(make_report(), ["--find-links", "dist"])
    assert plan[:3] == ["install", "--find-links", "dist"]
    assert plan[3:] == ["mine==1.0", "torch==2.13.0", "torchparts-conformance==0.1.0"]


@pytest.mark.parametrize("name", ["--index-url=evil", "a b", "x;y", "../x", "git+https://x"])
def test_plan_refuses_what_is_no_distribution(make_report, name):
    """A report cannot put options or addresses on pip's command line."""
    with pytest.raises(ReportError, match="which is no distribution and version"):
        _rerun.install_plan(make_report(name=name))


def test_plan_needs_versions(make_report):
    """What was never installed from a version cannot be had again."""
    report = make_report()
    report["implementation"]["distributions"][0]["version"] = None
    with pytest.raises(ReportError, match=r"names no version of \['mine'\]"):
        _rerun.install_plan(report)


def test_same_outcomes_are_no_difference(make_report):
    """Times, reasons and the adapter's address may differ."""
    second = copy.deepcopy(make_report(reason="slow"))
    second["implementation"]["adapter"] = "elsewhere:adapter"
    assert _rerun.differences(make_report(), second) == []


def test_other_outcome_or_code_is_a_difference(make_report):
    """A row that came out differently is named, and so is other code."""
    (said,) = _rerun.differences(make_report(), make_report({"CW-001": "fail"}))
    assert "CW-001 ckpt_wrap/test_a.py::test_a cpu: pass -> fail" in said
    other = make_report()
    other["implementation"]["distributions"][0]["sha256"] = "2" * 64
    (said,) = _rerun.differences(make_report(), other)
    assert said == "the second run differs in: implementation"
