"""The command that keeps reports and draws the trend."""

from __future__ import annotations

import json

import pytest

from torchparts_conformance.commands import _cli, _trends
from torchparts_conformance.listing import _entry
from torchparts_conformance.render import _render
from torchparts_conformance.report import _report


def _on(report, torch):
    made = {**report, "environment": {**report["environment"], "torch": torch}}
    made |= _report.derived(made)
    return {**made, "seal": _report.seal(made)}


@pytest.fixture
def pages(tmp_path, make_report):
    """Give a folder of pages with one published report."""
    _render.write(tmp_path / "docs/reports/mine.json", _report.to_text(make_report()))
    return tmp_path / "docs"


@pytest.fixture
def older(tmp_path, make_report):
    """Give a report of the same implementation on an older torch."""
    path = tmp_path / "older.json"
    path.write_text(_report.to_text(_on(make_report({"CW-001": "fail"}), "2.9.0")))
    return path


def test_report_is_kept_and_drawn(pages, older):
    """Page and picture follow from the reports, and `--check` sees where they do not."""
    assert _cli.main(["trend", str(pages), str(older)]) == 0
    (kept,) = (pages / "past").iterdir()
    assert kept.name == "mine-adapter-1.0-suite-0.1.0-torch-2.9.json"
    page = (pages / "trend.md").read_text()
    assert "| ckpt-wrap core | not conformant 0/1 | conformant 1/1 |" in page
    assert "](trend/mine-cpu.svg)" in page
    assert (pages / "trend/mine-cpu.svg").exists()
    assert _cli.main(["trend", str(pages), "--check"]) == 0


def test_drift_is_named(pages, older, capsys):
    """A page, a picture or a kept report that was changed by hand."""
    _cli.main(["trend", str(pages), str(older)])
    (kept,) = (pages / "past").iterdir()
    report = json.loads(kept.read_text())
    report["rows"][0]["outcome"] = "pass"
    kept.write_text(_report.to_text(report))
    (pages / "trend/mine-cpu.svg").write_text("<svg/>")
    (pages / "trend/nobody.svg").write_text("<svg/>")
    assert _cli.main(["trend", str(pages), "--check"]) == 1
    said = capsys.readouterr().err
    assert f"past/{kept.name}: the seal does not match" in said
    assert "trend/mine-cpu.svg does not follow from the reports; write it again" in said
    assert "trend/nobody.svg belongs to no report" in said


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"is_frozen": False}, "the suite was not as it had been frozen"),
        ({"problems": ("x was replaced",)}, r"the run had problems (x was replaced)"),
        ({"outcomes": {"CW-001": "not_run"}}, "cases were left out"),
    ],
)
def test_doubtful_report_is_not_kept(pages, tmp_path, make_report, capsys, changes, said):
    """What cannot be made again has to be right; nothing is written."""
    path = tmp_path / "doubtful.json"
    path.write_text(_report.to_text(make_report(**changes)))
    assert _cli.main(["trend", str(pages), str(path)]) == 4
    error = capsys.readouterr().err
    assert f"report 'doubtful.json': {said}, but what is kept cannot be made again" in error
    assert sorted(path.name for path in pages.iterdir()) == ["reports"]


def test_edited_report_is_not_kept(pages, older, capsys):
    """Its seal does not match."""
    older.write_text(older.read_text().replace("2.9.0", "2.8.0"))
    assert _cli.main(["trend", str(pages), str(older)]) == 4
    assert "the seal does not match" in capsys.readouterr().err


def test_wrong_words_are_refused(pages, older, capsys):
    """No folder; reports and a check at once."""
    assert _cli.main(["trend", str(pages / "nowhere")]) == 4
    assert "is no folder, but that of the suite's pages is needed" in capsys.readouterr().err
    assert _cli.main(["trend", str(pages), str(older), "--check"]) == 4
    assert "trend: reports and --check were both given" in capsys.readouterr().err


def test_what_is_replaced_by_another_torch_is_kept(pages, make_report):
    """A report of the same point is not; the past is what cannot be made again."""
    _trends.keep_replaced(pages, [make_report()])
    assert not (pages / "past").exists()
    _trends.keep_replaced(pages, [_on(make_report(), "2.15.0")])
    assert [path.name for path in (pages / "past").iterdir()] == [
        "mine-adapter-1.0-suite-0.1.0-torch-2.13.json"
    ]


def test_picture_of_nothing_is_taken_away(pages, older):
    """When the past of an implementation is gone, so is its trend."""
    _cli.main(["trend", str(pages), str(older)])
    (kept,) = (pages / "past").iterdir()
    kept.unlink()
    assert _cli.main(["trend", str(pages)]) == 0
    assert list((pages / "trend").iterdir()) == []
    assert "has one report" in (pages / "trend.md").read_text()


@pytest.mark.parametrize(("result", "counts"), [("verified", True), ("not reproducible", False)])
def test_entries_that_others_have_run_count(pages, entry, ran, make_report, result, counts):
    """One that nobody could make again does not."""
    listed = ran(entry, result)
    folder = pages / "registry/mine/1.0"
    _render.write(folder / "report.json", _report.to_text(_on(make_report(), "2.11.0")))
    _render.write(folder / "entry.toml", _entry.to_toml(listed))
    _trends.write(pages)
    assert ("torch 2.11" in (pages / "trend.md").read_text()) is counts


def test_committed_trend_follows_from_the_committed_reports(package):
    """The page and its pictures are those that the reports give."""
    docs = package.parents[2] / "docs" / "conformance"
    assert _trends.drift(docs) == []
    assert "torch 2.9" in (docs / "trend.md").read_text()
