"""The requirement pages follow from the cases."""

from __future__ import annotations

import pytest

from torchparts_conformance.commands import _cli
from torchparts_conformance.render import _spec_pages
from torchparts_conformance.requirements._areas import AREAS


def test_spec_writes_a_page_for_each_area(tmp_path):
    assert _cli.main(["spec", str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {f"spec-{area}.md" for area in AREAS}
    assert "## CW-001\n" in (tmp_path / "spec-ckpt-wrap.md").read_text()


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("a | b", "a \\| b"),
        ("<b> & c", "&lt;b&gt; & c"),
        ("  two\n\nlines ", "two lines"),
    ],
)
def test_words_of_a_requirement_stay_in_their_cell(text, written):
    assert _spec_pages.escape(text) == written


def test_page_has_a_line_and_a_section_for_each_requirement(registry, made_cases):
    page = _spec_pages.page("ckpt-wrap", registry.values(), {"CW-001": made_cases[:1]})
    assert page.startswith("# ckpt-wrap: requirements\n")
    assert "| [CW-001](#cw-001) | MUST | core | cpu, cuda | It MUST. |\n" in page
    assert "## CW-002\n\nIt SHOULD.\n\n- SHOULD, profile `robust`, cpu and cuda, since" in page
    assert page.count("- why: a reason") == 2
    assert "- case `ckpt_wrap/test_a.py::test_a`: \n" in page
    assert "deviates" not in page
