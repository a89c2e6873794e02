"""Files of a report are whole or not there, and all that belong to it are written."""

from __future__ import annotations

import os

import pytest

from torchparts_conformance.render import _matrix, _render
from torchparts_conformance.report import _report


@pytest.fixture(autouse=True)
def _known_requirements(monkeypatch, registry):
    """Let the matrix take the made-up requirements for the suite's."""
    monkeypatch.setattr(_render, "load_registry", lambda: registry)


def test_every_rendering_is_written_into_a_folder_that_is_made(make_report, tmp_path):
    """Badges of each area that was asked for, JUnit, both matrices and the report itself."""
    report = make_report()
    _render.write_all(report, tmp_path / "deep" / "out")
    assert {path.name for path in (tmp_path / "deep" / "out").iterdir()} == {
        "badge-ckpt-wrap.json",
        "badge-ckpt-wrap.svg",
        "junit.xml",
        "matrix.html",
        "matrix.md",
        "report.json",
    }
    assert _report.read(tmp_path / "deep" / "out" / "report.json") == report


def test_report_comes_last(make_report, tmp_path, monkeypatch):
    """Where a rendering fails there is no report that says the run is complete."""

    def fail(_):
        raise RuntimeError("no room")

    monkeypatch.setattr(_matrix, "to_markdown", fail)
    with pytest.raises(RuntimeError, match="no room"):
        _render.write_all(make_report(), tmp_path)
    assert (tmp_path / "junit.xml").exists()
    assert not (tmp_path / "report.json").exists()


@pytest.mark.parametrize("wanted", [{"page"}, {"markdown"}, {"page", "markdown"}])
def test_matrix_is_written_where_it_was_asked_for(make_report, tmp_path, wanted):
    """A page, Markdown, or both, each with its own text."""
    places = {word: tmp_path / word for word in ("page", "markdown")}
    given = [path if word in wanted else None for word, path in places.items()]
    _render.write_matrix([make_report()], *given)
    assert {path.name for path in tmp_path.iterdir()} == wanted
    starts = {"page": "<!doctype html>", "markdown": "# "}
    for word in wanted:
        assert places[word].read_text(encoding="utf-8").lower().startswith(starts[word])


def test_file_is_replaced_as_a_whole(tmp_path, monkeypatch):
    """Until all of the new text is on the disk, the old one is what a reader finds."""
    path = tmp_path / "file"
    path.write_text("old")
    found = []
    replace = os.replace

    def look(beside, place):
        found.append((path.read_text(), beside.read_text(), beside.parent))
        replace(beside, place)

    monkeypatch.setattr(os, "replace", look)
    _render.write(path, "new")
    assert found == [("old", "new", tmp_path)]
    assert path.read_text() == "new"
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_bytes_of_a_file_are_the_same_everywhere(tmp_path):
    """UTF-8, with the ends of lines that were given."""
    _render.write(tmp_path / "file", "a\n\N{CHECK MARK}\n")
    assert (tmp_path / "file").read_bytes() == b"a\n\xe2\x9c\x93\n"
