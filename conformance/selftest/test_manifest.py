"""What was frozen and what was generated is what the suite is now."""

from __future__ import annotations

import json

from torchparts_conformance.render import _spec_pages
from torchparts_conformance.requirements import _manifest
from torchparts_conformance.requirements._registry import AREAS


def test_frozen_list_is_the_one_of_the_cases():
    """The requirement and case files are those that were frozen."""
    manifest = json.loads(_manifest.LOCK.read_text())
    assert manifest["files"] == _manifest.file_fingerprints()


def test_requirement_pages_are_up_to_date(package):
    """The pages in the documentation are those the registry gives."""
    folder = package.parents[2] / "docs" / "conformance"
    assert _spec_pages.drift(folder) == []
    assert {f"spec-{area}.md" for area in AREAS} <= {path.name for path in folder.iterdir()}


def test_drift_of_a_page_is_noticed(tmp_path):
    """A page that was edited by hand is named."""
    for name, text in _spec_pages.pages().items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert _spec_pages.drift(tmp_path) == []
    (tmp_path / "spec-combined.md").write_text("edited", encoding="utf-8")
    assert _spec_pages.drift(tmp_path) == ["spec-combined.md"]


def test_freezing_keeps_withdrawn_ids(tmp_path):
    """An id that left the list is remembered, so that it is not used again."""
    path = tmp_path / "lock.json"
    _manifest.freeze([_manifest.Row("CW-001", "a"), _manifest.Row("CW-002", "b")], path=path)
    again = _manifest.freeze([_manifest.Row("CW-001", "a")], path=path)
    assert again.withdrawn == ("CW-002",)
    assert _manifest.load_manifest(path) == again
