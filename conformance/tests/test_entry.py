"""An entry of the list: what its file may say, and what its label is on a day."""

from __future__ import annotations

import dataclasses
import datetime
import re

import pytest

from torchparts_conformance._errors import ReportError
from torchparts_conformance.listing import _entry
from torchparts_conformance.listing._entry import Objection, Run

DAY = datetime.date(2026, 11, 22)


LATER = datetime.date(2027, 11, 21)


LOG = "https://example.org/runs/1"


ADAPTER = "mine:adapter"


LINES = f"""
adapter = "{ADAPTER}"
contact = "someone@example.org"
source = "https://example.org/mine"
submitted = 2026-11-22
"""


def test_text_of_an_entry_is_read_back(entry, ran):
    """Runs, disputes and a withdrawal, with whatever signs."""
    full = dataclasses.replace(
        ran(entry, "verified", "not reproducible"),
        disputes=(Objection(DAY, "a@b.org", 'a "quoted"\n\\ reason', "no"),),
        withdrawn=Objection(LATER, "https://b.org", "gone \x7f"),
    )
    for each in (entry, full):
        assert _entry.parse(_entry.to_toml(each), "1.0", each.report) == each


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("adapter = 1", "entry.adapter is 1"),
        ("adapter = 'a b'", "entry.adapter is 'a b'"),
        (LINES.replace("someone@example.org", "me"), "entry.contact is 'me'"),
        (LINES.replace("https", "javascript"), "entry.source is"),
        (LINES.replace("2026-11-22", "2026-11-22T10:00:00"), "entry.submitted is"),
        (LINES + "run = 1", "run is no list"),
        (LINES + "run = [1]", "run is no table"),
        (LINES + "verified = true", "unknown word 'verified'"),
        (LINES + "[[run]]\nday = 2026-11-22\nresult = 'good'\nby = 'https://a.org'", "'good'"),
        (LINES + "[[dispute]]\nday = 2026-11-22\nby = 'a@b.org'\nreason = ' '", "dispute.reason"),
        (LINES + "[withdrawn]\nday = 2026-11-22\nby = 'a@b.org'", "withdrawn.reason is None"),
        (LINES.replace("mine:adapter", "m" * 301), "entry.adapter"),
        ("a = [", "entry '1.0'"),
    ],
)
def test_entry_of_another_form_is_refused(make_report, text, said):
    """By the word that is wrong."""
    with pytest.raises(ReportError, match=re.escape(said)) as caught:
        _entry.parse(text, "1.0", make_report())
    assert "Correct it." in str(caught.value)


def test_label_is_what_the_last_run_came_to(entry, ran):
    """A run that differs ends what was verified before, and a later one begins it anew."""
    assert entry.label(DAY) == "submitted"
    for result in _entry.RESULTS:
        assert ran(entry, "verified", result).label(DAY) == result
    again = ran(entry, "verified", "not reproducible")
    assert again.earned is None
    again = dataclasses.replace(again, runs=(*again.runs, Run(LATER, "verified", LOG)))
    assert again.earned == LATER


def test_open_dispute_and_withdrawal_come_before_any_run(entry, ran):
    """An answered dispute does not."""
    objection = Objection(DAY, "a@b.org", "no")
    disputed = dataclasses.replace(ran(entry, "verified"), disputes=(objection,))
    assert disputed.label(DAY) == "disputed"
    answered = dataclasses.replace(objection, answer="it is right")
    assert dataclasses.replace(disputed, disputes=(answered,)).label(DAY) == "verified"
    withdrawn = dataclasses.replace(disputed, withdrawn=objection)
    assert withdrawn.label(DAY) == "withdrawn"


def test_verified_expires_after_a_year_or_with_its_torch(entry, monkeypatch, ran):
    """On the day itself; a second run does not renew it."""
    verified = ran(entry, "verified")
    assert verified.expires == DAY.replace(year=2027)
    assert verified.label(LATER) == "verified"
    assert verified.label(verified.expires) == "expired"
    twice = dataclasses.replace(verified, runs=(*verified.runs, Run(LATER, "verified", LOG)))
    assert twice.expires == verified.expires
    assert ran(entry, "failed cases").label(verified.expires) == "failed cases"
    leap = ran(entry, "verified", day=datetime.date(2028, 2, 29))
    assert leap.expires == datetime.date(2029, 3, 1)
    monkeypatch.setattr(_entry, "OLDEST_TORCH", (2, 14))
    assert verified.label(DAY) == "expired"


def test_end_is_told_before_it_comes_and_by_what_brought_it(entry, monkeypatch, ran):
    """60 days before; where torch was the end, the year's day is not named."""
    verified = ran(entry, "verified")
    assert entry.ending(DAY) == "-"
    assert verified.ending(verified.expires - datetime.timedelta(days=61)) == "2027-11-22"
    assert verified.ending(verified.expires - datetime.timedelta(days=60)) == "soon: 2027-11-22"
    assert verified.ending(verified.expires) == "2027-11-22"
    monkeypatch.setattr(_entry, "OLDEST_TORCH", (2, 14))
    assert verified.ending(DAY) == "with torch 2.13"
    assert verified.ending(verified.expires) == "2027-11-22"


def test_oldest_torch_is_that_of_the_package(package):
    """What the distribution asks for."""
    project = (package.parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    assert f'"torch>={".".join(map(str, _entry.OLDEST_TORCH))}"' in project
