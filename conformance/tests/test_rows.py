"""What one case came to becomes the rows of its requirements."""

from __future__ import annotations

import pytest

from torchparts_conformance.report import _report
from torchparts_conformance.run import _rows
from torchparts_conformance.run._case_result import CaseResult


@pytest.fixture
def entry(registry):
    """What a case about both requirements came to."""
    found = CaseResult("a.py::test_a", "cpu", tuple(registry.values()))
    found.outcome, found.reason, found.where = "fail", "r" * 5000, "w" * 5000
    found.duration_s = 0.12367
    return found


def test_a_case_has_a_row_for_each_requirement_with_times_in_milliseconds(entry, registry):
    """Reasons and places are cut to what a report may hold."""
    rows = _rows.rows([entry], lacks=lambda requirement: "")
    assert [row["id"] for row in rows] == ["CW-001", "CW-002"]
    assert [row["level"] for row in rows] == ["MUST", "SHOULD"]
    for row in rows:
        assert _report.reason_of(row) == row["reason"]
        assert row["duration_s"] == 0.124
        assert (row["outcome"], row["device"]) == ("fail", "cpu")
        assert len(row["reason"]) == _report.MAX_REASON
        assert len(row["where"]) == _report.MAX_WHERE


def test_what_nobody_is_held_to_says_so_whatever_came_out(entry):
    """The requirement's own word takes the place of the outcome, and no row repeats why."""
    lacks = lambda requirement: "not_claimed" if requirement.id == "CW-002" else ""  # noqa: E731
    rows = _rows.rows([entry], lacks=lacks)
    assert {row["id"]: row["outcome"] for row in rows} == {
        "CW-001": "fail",
        "CW-002": "not_claimed",
    }
    (left,) = (row for row in rows if row["id"] == "CW-002")
    assert (left["reason"], left["where"]) == ("", "")
    assert _report.reason_of(left) == f"profile {left['profile']} is not claimed"
    assert _report.reason_of({**left, "reason": "an older suite's"}) == "an older suite's"


def test_cases_that_were_not_collected_are_rows(registry, made_cases):
    asked = {"areas": ["ckpt-wrap"], "devices": ["cpu", "cuda"]}
    found = list(_rows.missing([], made_cases, registry, **asked))
    assert {(each.case, each.device) for each in found} == {
        (case.name, device) for case in made_cases for device in ("cpu", "cuda")
    }
    assert {each.reason for each in found} == {"was not collected"}
    there = [
        CaseResult(f"{case.name}[2-x]", device, (registry[id],))
        for case in made_cases
        for id in case.ids
        for device in ("cpu", "cuda")
    ]
    assert list(_rows.missing(there, made_cases, registry, **asked)) == []
    (left,) = _rows.missing(there[1:], made_cases, registry, **asked)
    assert (left.case, left.device) == (made_cases[0].name, "cpu")
    other = {"areas": ["mod-tracker"], "devices": ["cpu"]}
    assert list(_rows.missing([], made_cases, registry, **other)) == []
