"""An entry that is run again: the run is added to it, with what it came to."""

from __future__ import annotations

import dataclasses
import datetime

import pytest

from torchparts_conformance._errors import ReportError
from torchparts_conformance.listing import _entry, _recheck, _submit
from torchparts_conformance.listing._entry import Run
from torchparts_conformance.verify import _rerun
from torchparts_conformance.verify._rerun import Source

DAY = datetime.date(2027, 1, 31)
LOG = "https://example.org/runs/2"


@pytest.fixture
def rechecked(monkeypatch, tmp_path):
    """Give a function that submits an entry and runs it again; gives what differs and the entry."""

    def recheck(entry, differences=()):
        asked = []

        def rerun(report, **options):
            asked.append((report, options))
            return list(differences)

        # A real second run makes an environment; `test_listing` does that once.
        monkeypatch.setattr(_rerun, "rerun", rerun)
        folder = _submit.submit(entry.report, entry, tmp_path)
        source = Source(reuses_torch=True)
        found = _recheck.recheck(folder, day=DAY, by=LOG, source=source, python="python3")
        options = {"adapter": "mine:adapter", "python": "python3", "source": source}
        assert asked == [(entry.report, options)]
        return found, _entry.read(folder)

    return recheck


def test_run_that_agrees_verifies_a_conformant_entry(entry, rechecked):
    """Day, result and address of the run are what the entry says afterwards."""
    found, after = rechecked(entry)
    assert found == []
    assert after == dataclasses.replace(entry, runs=(Run(DAY, "verified", LOG),))


def test_run_that_agrees_on_failures_verifies_nothing(entry, make_report, rechecked):
    """The same failures again are failures."""
    failing = dataclasses.replace(entry, report=make_report({"CW-001": "fail"}))
    found, after = rechecked(failing)
    assert found == []
    assert [run.result for run in after.runs] == ["failed cases"]


def test_run_that_differs_is_noted_and_its_differences_are_given(entry, rechecked):
    """Whatever the first report says."""
    found, after = rechecked(entry, ["the second run differs in: verdict"])
    assert found == ["the second run differs in: verdict"]
    assert [run.result for run in after.runs] == ["not reproducible"]


def test_run_comes_behind_earlier_ones(entry, ran, rechecked):
    """Nothing that was there is overwritten."""
    _, after = rechecked(ran(entry, "not reproducible"))
    assert [run.result for run in after.runs] == ["not reproducible", "verified"]
    assert after.runs[0].day == entry.submitted


def test_folder_without_an_entry_is_refused(tmp_path):
    """By the file that is missing."""
    with pytest.raises(ReportError, match=r"report 'report\.json' cannot be read"):
        _recheck.recheck(tmp_path, day=DAY, by=LOG, source=Source())
