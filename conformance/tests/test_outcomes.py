"""What outcomes mean together: a MUST decides, and what is absent as a whole does not count."""

from __future__ import annotations

import itertools

import pytest

from torchparts_conformance.report import _outcomes, _report
from torchparts_conformance.report._outcomes import OUTCOMES


def test_everything_of_an_area_may_be_absent():
    """Then its capabilities are, too."""
    rows = [{"area": "a", "group": g, "outcome": "not_provided"} for g in ("one", "two", "")]
    assert _outcomes.absent(rows) == {("a", "one"), ("a", "two"), ("a", "")}
    rows[0]["outcome"] = "fail"
    assert _outcomes.absent(rows) == {("a", "two")}


@pytest.mark.parametrize(
    ("outcomes", "verdict", "code"),
    [
        ({}, "conformant", 0),
        ({"CW-002": "fail"}, "conformant", 0),
        ({"CW-001": "fail"}, "not conformant", 1),
        ({"CW-001": "error"}, "not conformant", 1),
        ({"CW-001": "xfail"}, "announced failures", 0),
        ({"CW-001": "xpass"}, "not conformant", 1),
        ({"CW-002": "not_run"}, "not conformant", 1),
        ({"CW-001": "no_device", "CW-002": "no_device"}, "no device", 3),
        ({"CW-001": "not_claimed", "CW-002": "not_claimed"}, "not provided", 1),
        ({"CW-001": "not_provided", "CW-002": "not_provided"}, "not provided", 1),
        ({"CW-001": "not_provided"}, "not conformant", 1),
        ({"CW-002": "not_provided"}, "not conformant", 1),
    ],
)
def test_verdict_and_exit_code(make_report, outcomes, verdict, code):
    """A MUST decides, a SHOULD is shown, and nothing that did not run counts as done."""
    report = make_report(outcomes)
    assert (report["verdict"], _report.exit_code(report)) == (verdict, code)


def test_run_with_a_problem_is_not_conformant(make_report):
    assert make_report(problems=("stale",))["verdict"] == "not conformant"


ORDER = [
    "error",
    "fail",
    "xpass",
    "not_run",
    "not_provided",
    "xfail",
    "no_device",
    "not_claimed",
    "pass",
]


@pytest.mark.parametrize(("bad", "good"), list(itertools.pairwise(ORDER)))
def test_worst_of_the_cases_is_the_outcome_of_a_requirement(bad, good):
    """Whatever their order, and how many there are of the better one."""
    assert _outcomes.worst([good, bad, good]) == bad
    assert _outcomes.worst([good]) == good


def test_every_outcome_can_be_the_worst():
    """None of them is unknown there."""
    assert {_outcomes.worst([outcome]) for outcome in OUTCOMES} == set(OUTCOMES)


@pytest.mark.parametrize(
    ("rows", "verdict"),
    [
        ({"MUST": "pass", "SHOULD": "fail"}, "conformant"),
        ({"MUST": "pass", "SHOULD": "not_claimed"}, "conformant"),
        ({"SHOULD": "error"}, "conformant"),
        ({"MUST": "not_claimed", "SHOULD": "pass"}, "not conformant"),
        ({"MUST": "pass", "SHOULD": "xpass"}, "not conformant"),
        ({"MUST": "pass", "SHOULD": "no_device"}, "not conformant"),
        ({"MUST": "xfail"}, "not conformant"),
        ({"MUST": "not_claimed"}, "not claimed"),
        ({"MUST": "not_provided", "SHOULD": "not_claimed"}, "not provided"),
        ({"MUST": "no_device", "SHOULD": "not_claimed"}, "no device"),
        ({"MUST": "no_device", "SHOULD": "not_provided"}, "not conformant"),
    ],
)
def test_profile_is_conformant_where_every_must_of_it_passed(rows, verdict):
    """And nothing, at whatever level, was left out."""
    found = [{"level": level, "outcome": outcome} for level, outcome in rows.items()]
    assert _outcomes.profile_verdict(found, sound=True) == verdict
    unsound = _outcomes.profile_verdict(found, sound=False)
    assert unsound == ("not conformant" if verdict == "conformant" else verdict)
