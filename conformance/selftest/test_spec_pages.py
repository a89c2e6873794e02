"""The pages of requirements follow from the registry and the cases."""

from __future__ import annotations

from torchparts_conformance.render import _spec_pages
from torchparts_conformance.requirements._registry import AREAS


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
