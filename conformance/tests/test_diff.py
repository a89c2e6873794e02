"""What changed between two reports: regressions first, and a lost row is one."""

from __future__ import annotations

from torchparts_conformance.report import _diff


def test_diff_lists_regressions_first(make_report):
    """What passed and does not any more comes first; a MUST among it blocks."""
    old = make_report({"CW-002": "fail"})
    new = make_report({"CW-001": "fail"})
    first, second = _diff.compare(old, new)
    assert str(first) == "regressed CW-001 MUST cpu ckpt_wrap/test_a.py::test_a: pass -> fail"
    assert (first.blocks, second.blocks) == (True, False)
    assert _diff.compare(old, old) == []


def test_diff_counts_a_lost_row_as_a_regression(make_report):
    """A requirement that is not checked any more did not get better."""
    new = make_report()
    new["rows"] = new["rows"][1:]
    (change,) = _diff.compare(make_report(), new)
    assert (change.after, change.blocks) == ("absent", True)


def test_only_a_must_that_passed_before_blocks(make_report):
    """A SHOULD that regressed does not, nor a MUST that failed already."""
    (change,) = _diff.compare(make_report(), make_report({"CW-002": "fail"}))
    assert (change.is_regression, change.blocks) == (True, False)
    old, new = make_report({"CW-001": "fail"}), make_report({"CW-001": "error"})
    (change,) = _diff.compare(old, new)
    assert (change.is_regression, change.blocks) == (False, False)
