"""The page of the list: it follows from entries and a day, and shows no markup of theirs."""

from __future__ import annotations

import copy
import dataclasses
import datetime

import pytest

from torchparts_conformance._errors import ReportError
from torchparts_conformance.listing import _entry, _page, _submit
from torchparts_conformance.listing._entry import Objection

DAY = datetime.date(2026, 11, 22)


def test_badge_of_an_entry_names_torch_and_day_until_it_expires(entry, ran):
    """Grey afterwards, and before somebody else has run it."""
    (badge,) = _page.dated(ran(entry, "verified"), DAY)
    assert badge.message == "core+robust 1/1 | cpu | torch 2.13 | 2026-11-22"
    assert badge.color == "brightgreen"
    (badge,) = _page.dated(ran(entry, "verified"), DAY.replace(year=2028))
    assert (badge.message, badge.color) == ("expired 2027-11-22", "lightgrey")
    (badge,) = _page.dated(entry, DAY)
    assert (badge.message, badge.color) == ("submitted", "lightgrey")


def test_what_expired_with_its_torch_says_so(entry, tmp_path, monkeypatch, ran):
    """The badge names no day that is still to come, and the page warns of one that is near."""
    _submit.submit(entry.report, ran(entry, "verified"), tmp_path)
    _page.write(tmp_path, DAY.replace(year=2027, month=10))
    text = (tmp_path / "index.md").read_text(encoding="utf-8")
    assert "| 2026-11-22 | soon: 2027-11-22 | [verified]" in text
    monkeypatch.setattr(_entry, "OLDEST_TORCH", (2, 14))
    _page.write(tmp_path, DAY)
    text = (tmp_path / "index.md").read_text(encoding="utf-8")
    assert "| 2026-11-22 | with torch 2.13 | [expired]" in text
    (badge,) = _page.dated(ran(entry, "verified"), DAY)
    assert (badge.message, badge.color) == ("expired with torch 2.13", "lightgrey")


def test_page_shows_entries_and_nothing_of_their_markup(entry, tmp_path, ran, changed):
    """Every entry has its row, and files that were edited are named."""
    _page.write(tmp_path, DAY)
    assert "There are none yet." in (tmp_path / "index.md").read_text(encoding="utf-8")
    hostile = changed(entry.report, name="[x](javascript:1) <b>", version="1.0")
    withdrawn = Objection(DAY, "a@b.org", "<img> | cell")
    _submit.submit(entry.report, ran(entry, "verified"), tmp_path)
    _submit.submit(
        hostile, dataclasses.replace(entry, report=hostile, withdrawn=withdrawn), tmp_path
    )
    _page.write(tmp_path, DAY)
    text = (tmp_path / "index.md").read_text(encoding="utf-8")
    assert "[verified](https://example.org/runs/1)" in text
    assert "javascript:1)" not in text
    assert "<" not in text.replace("<br>", "")
    assert text.count("\n|") == 4
    assert _page.drift(tmp_path) == []
    (tmp_path / "mine/1.0/badge-ckpt-wrap.svg").write_text("edited", encoding="utf-8")
    assert _page.drift(tmp_path) == ["mine/1.0/badge-ckpt-wrap.svg is out of date; write it again"]
    (tmp_path / "mine/1.0").rename(tmp_path / "mine/2.0")
    with pytest.raises(ReportError, match=r"mine/2\.0 holds a report of another name"):
        _page.drift(tmp_path)


def test_reports_of_this_suite_are_verified_again(entry, expected):
    """Those of an older suite were judged by theirs."""
    edited = copy.deepcopy(entry.report)
    edited["implementation"]["version"] = "2.0"
    listed = dataclasses.replace(entry, report=edited)
    said = "mine/1.0: the seal does not match: the file was changed after it was written"
    assert said in _page.problems({"mine/1.0": listed}, expected)
    newer = dataclasses.replace(expected, version="9.0")
    assert _page.problems({"mine/1.0": listed}, newer) == []
