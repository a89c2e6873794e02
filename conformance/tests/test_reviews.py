"""The command that writes the page of the yearly review."""

from __future__ import annotations

import datetime

import pytest

from torchparts_conformance._errors import RegistryError
from torchparts_conformance.commands import _cli, _reviews
from torchparts_conformance.render import _render
from torchparts_conformance.report import _report


@pytest.fixture
def pages(tmp_path, make_report):
    """Give a folder of pages with one published report."""
    _render.write(tmp_path / "reports/mine.json", _report.to_text(make_report()))
    return tmp_path


def test_page_is_written_and_then_up_to_date(pages, capsys):
    """It says its day; `--check` sees a change, and a page without a day."""
    assert _cli.main(["review", str(pages), "--day", "2026-11-24"]) == 0
    page = pages / "review.md"
    assert "## As of 2026-11-24" in page.read_text()
    assert _cli.main(["review", str(pages), "--check"]) == 0
    page.write_text(page.read_text().replace("no badge is lost", "a badge is lost"))
    assert _cli.main(["review", str(pages), "--check"]) == 1
    assert "review.md is out of date; write it again" in capsys.readouterr().err
    page.unlink()
    assert _cli.main(["review", str(pages), "--check"]) == 1
    assert "review.md has no day; write it again" in capsys.readouterr().err


def test_folder_without_reports_is_refused(tmp_path, capsys):
    """A review is about reports."""
    assert _cli.main(["review", str(tmp_path)]) == 4
    assert "holds no published reports, but a review is about them" in capsys.readouterr().err


def test_days_of_versions_are_read(pages):
    """A version that is not named was not released."""
    assert _reviews.released(pages) == {}
    (pages / "released.toml").write_text('"0.1.0" = 2026-12-01\n')
    assert _reviews.released(pages) == {"0.1.0": datetime.date(2026, 12, 1)}


@pytest.mark.parametrize("text", ['"0.1.0" = "soon"', "0.1.0 = 2026-12-01", '"0.1.0" ='])
def test_days_that_are_none_are_refused(pages, text):
    """With what a line looks like."""
    (pages / "released.toml").write_text(text)
    with pytest.raises(RegistryError, match=r'but a line reads "0\.1\.0" = 2026-12-01'):
        _reviews.released(pages)


def test_committed_page_follows_from_the_committed_reports(package):
    """What a reviewer reads is what the reports say."""
    assert _reviews.drift(package.parents[2] / "docs" / "conformance") == []
