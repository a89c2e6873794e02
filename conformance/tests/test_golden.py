"""What a report and its renderings look like, byte for byte, for one made-up implementation.

After a change that is meant, `WRITE_GOLDEN=1 python -m pytest selftest/test_golden.py` writes the
files again; the difference is then read like any other.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from torchparts_conformance.render import _badge, _html, _junit, _matrix
from torchparts_conformance.report import _report

GOLDEN = Path(__file__).parent / "golden"
NAMES = ("report.json", "junit.xml", "badge.json", "badge.svg", "matrix.md", "matrix.html")


@pytest.fixture
def rendered(make_report, registry):
    """Give the text of each file: one requirement failed, one passed, on one of two devices."""
    report = make_report(
        {"CW-001": "fail", "CW-002": "pass"},
        name="<mine> & theirs",
        reason="AssertionError: 41 == 42",
    )
    (badge,) = _badge.badges(report)
    matrix = _matrix.matrix([report], registry)
    return {
        "report.json": _report.to_text(report),
        "junit.xml": _junit.to_junit(report),
        "badge.json": _badge.to_shields(badge),
        "badge.svg": _badge.to_svg(badge),
        "matrix.md": _matrix.to_markdown(matrix),
        "matrix.html": _html.to_html(matrix, {}, {}),
    }


@pytest.mark.parametrize("name", NAMES)
def test_rendering_is_the_golden_one(rendered, name):
    """A change of format is seen, and made on purpose."""
    path = GOLDEN / name
    if os.environ.get("WRITE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(rendered[name], encoding="utf-8", newline="\n")
    assert rendered[name] == path.read_bytes().decode("utf-8")


def test_golden_report_is_of_this_version(rendered):
    """What was stored once is still read, and gives the same renderings."""
    report = _report.read(GOLDEN / "report.json")
    (badge,) = _badge.badges(report)
    assert _badge.to_svg(badge) == rendered["badge.svg"]
