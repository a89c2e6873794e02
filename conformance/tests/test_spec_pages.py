"""The pages of requirements follow from the registry and the cases."""

from __future__ import annotations

import pytest

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


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("a | b", "a \\| b"),
        ("<b> & c", "&lt;b&gt; & c"),
        ("  two\n\nlines ", "two lines"),
    ],
)
def test_words_of_a_requirement_stay_in_their_cell(text, written):
    """No cell, tag or line begins in them."""
    assert _spec_pages.escape(text) == written


def test_page_has_a_line_and_a_section_for_each_requirement(registry):
    """With the reason, and with what torch's own does where that is known."""
    page = _spec_pages.page("mod-tracker", registry.values(), {}, {})
    assert page.startswith("# mod-tracker: requirements\n")
    assert "edit `spec/mod_tracker.toml` instead" in page
    assert "| [CW-001](#cw-001) | MUST | core | cpu, cuda | It MUST. |\n" in page
    assert "## CW-002\n\nIt SHOULD.\n\n- SHOULD, profile `robust`, cpu and cuda, since" in page
    assert page.count("- why: a reason") == 2
    assert page.endswith("- why: a reason\n")
    assert "deviates" not in page
