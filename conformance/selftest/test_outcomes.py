"""What outcomes mean together: a MUST decides, and what is absent as a whole does not count."""

from __future__ import annotations

import pytest

from torchparts_conformance.report import _outcomes, _report


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


@pytest.mark.parametrize("changes", [{"is_frozen": False}, {"problems": ("stale",)}])
def test_unsound_run_is_not_conformant(make_report, changes):
    """A changed suite or an untrue announcement spoils a run that passed."""
    assert make_report(**changes)["verdict"] == "not conformant"
