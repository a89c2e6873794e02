"""The attestation says the same as the report, in in-toto's words."""

from __future__ import annotations

from torchparts_conformance.report import _predicate


def test_predicate_lists_what_passed_warned_and_failed(make_report):
    """The attestation says the same as the report, in in-toto's words."""
    said = _predicate.predicate(make_report({"CW-001": "fail", "CW-002": "fail"}))
    assert said["result"] == "FAILED"
    assert said["failedTests"] == ["CW-001 ckpt_wrap/test_a.py::test_a [cpu]"]
    assert said["warnedTests"] == ["CW-002 ckpt_wrap/test_a.py::test_b [cpu]"]
    assert _predicate.predicate(make_report())["result"] == "PASSED"
    skipped = _predicate.predicate(make_report({"CW-001": "no_device"}))
    assert len(skipped["failedTests"]) == 1


def test_predicate_is_silent_about_what_is_not_claimed_or_not_provided(make_report):
    """They count neither for nor against; what is provided beside them is listed."""
    lists = ("passedTests", "warnedTests", "failedTests")
    said = _predicate.predicate(make_report({"CW-002": "not_claimed"}))
    assert [len(said[name]) for name in lists] == [1, 0, 0]
    said = _predicate.predicate(make_report({"CW-001": "not_provided", "CW-002": "not_provided"}))
    assert [len(said[name]) for name in lists] == [0, 0, 0]


def test_predicate_names_an_older_list(by_older_list, make_report):
    """Beside the suite that ran."""
    (named,) = _predicate.predicate(by_older_list)["configuration"]
    assert named["name"] == "torchparts-conformance 0.1.0, list of 0.0.9"
    (plain,) = _predicate.predicate(make_report())["configuration"]
    assert plain["name"] == "torchparts-conformance 0.1.0"
