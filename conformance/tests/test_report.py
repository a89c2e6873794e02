"""Reports: their digest, and that they read back or are refused in a line."""

from __future__ import annotations

import pytest

from torchparts_conformance._errors import ReportError
from torchparts_conformance.report import _report

EVIL = "<script>alert(1)</script>\"'&\x1b[31m\x00../../etc"


def test_digest_leaves_out_times_and_reasons_but_not_outcomes(make_report):
    """Two runs of the same thing agree; a different outcome does not."""
    assert make_report()["digest"] == make_report(reason="slow today")["digest"]
    assert make_report()["digest"] != make_report({"CW-001": "fail"})["digest"]
    assert make_report()["seal"] != make_report(reason="slow today")["seal"]


def _stored(tmp_path, text):
    path = tmp_path / "report.json"
    path.write_text(text, encoding="utf-8")
    return path


def test_report_reads_back(make_report, tmp_path):
    """A stored report is the report."""
    report = make_report({"CW-001": "fail"}, reason=EVIL.replace("\x00", ""))
    assert _report.read(_stored(tmp_path, _report.to_text(report))) == report


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda text: text[: len(text) // 2], "is no whole JSON file"),
        (lambda text: "", "is no whole JSON file"),
        (lambda text: "[" * 100_000, "is no whole JSON file"),
        (lambda text: text.replace("0.1", "NaN"), "NaN is not JSON"),
        (lambda text: text.replace("0.1", "1e999"), "is inf, but 1000000000 is the most"),
        (lambda text: text.replace('"complete"', '"seal": "", "complete"'), "a key is there twice"),
        (lambda text: text.replace("report:1", "report:2"), "but this suite reads"),
        (lambda text: text.replace('"complete": true', '"complete": false'), "breaks its schema"),
        (lambda text: "[]", "has schema None"),
    ],
)
def test_unreadable_report_is_one_clear_line(make_report, tmp_path, spoil, said):
    """A cut, foreign or hostile file is refused in a line that names it."""
    path = _stored(tmp_path, spoil(_report.to_text(make_report())))
    with pytest.raises(ReportError, match=said) as caught:
        _report.read(path)
    assert "report.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_and_oversized_reports_are_refused(tmp_path, monkeypatch):
    """A file that is not there or larger than allowed is not read."""
    with pytest.raises(ReportError, match="cannot be read"):
        _report.read(tmp_path / "none.json")
    monkeypatch.setattr(_report, "MAX_BYTES", 10)
    with pytest.raises(ReportError, match="exceeds 10 bytes"):
        _report.read(_stored(tmp_path, " " * 11))
