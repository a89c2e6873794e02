"""The matrix: what it shows, and that nothing in it is ever taken for markup."""

from __future__ import annotations

import dataclasses
import html
import html.parser
import json
import xml.etree.ElementTree

import pytest

from torchparts_conformance._errors import ReportError
from torchparts_conformance.render import _badge, _html, _junit, _matrix, _text


def test_markdown_has_a_word_for_every_cell(make_report, registry):
    """Each device that was asked about has its column, and the others have none."""
    matrix = _matrix.matrix([make_report({"CW-001": "fail"}, name="a|b")], registry)
    text = _matrix.to_markdown(matrix)
    assert "| profile | a&#124;b 1.0 / cpu |\n" in text
    assert "| ckpt-wrap core | not conformant 0/1 |\n" in text
    both = _matrix.matrix([make_report(devices=("cpu", "cuda"))], registry)
    assert "| profile | mine 1.0 / cpu | mine 1.0 / cuda |" in _matrix.to_markdown(both)
    assert "\N{BALLOT X} fail" in text


def test_areas_that_nobody_ran_have_no_rows(make_report, registry):
    """A run of one area is not found under a screen of what it was not asked for."""
    other = dataclasses.replace(registry["CW-001"], id="MT-001", area="mod-tracker")
    matrix = _matrix.matrix([make_report()], {"MT-001": other, **registry})
    assert [requirement.id for requirement in matrix.requirements] == ["CW-001", "CW-002"]
    assert "mod-tracker" not in _matrix.to_markdown(matrix)


MARKUP = [
    "[fine](https://example.org/x)",
    "![p](https://example.org/p.png)",
    "<https://example.org>",
    "https://example.org",
    "www.example.org",
    "a@example.org",
    "@everyone",
    "[fine]: x",
    "`a` | b",
    "**b** _i_ ~~s~~",
    "a &lt;b",
    "\\[x](y)",
    "[^1] #12",
]


@pytest.mark.parametrize("word", MARKUP)
def test_markdown_takes_nothing_from_a_report_for_markup(make_report, registry, word):
    """Names, versions and the suite's own number are text: what could be markup is a reference."""
    report = make_report(name=word)
    report["implementation"]["version"] = word
    report["environment"]["torch"] = word
    report["suite"]["version"] = word
    text = _matrix.to_markdown(_matrix.matrix([report], registry))
    plain = _matrix.to_markdown(_matrix.matrix([make_report()], registry))
    assert html.unescape(text).count(word) == 8
    for said, nothing in (("mine", ""), ("Suite 0.1.0", "Suite "), (" 1.0 / ", "  / ")):
        plain = plain.replace(said, nothing)
    assert text.replace(_text.markdown(word), "") == plain.replace("| 2.13.0 |", "|  |")
    assert not set(_text.markdown(word)) & set("[]<>`*_|!~@:\\{}")
    assert "www." not in _text.markdown(word)


@pytest.mark.parametrize("word", MARKUP)
def test_pages_and_pictures_take_nothing_from_a_report_for_markup(make_report, registry, word):
    """The same words in the page, the badge and JUnit's file come back out as they were."""
    report = make_report({"CW-001": "fail"}, name=word, reason=word)
    page = _html.to_html(_matrix.matrix([report], registry), {})
    assert f"<th scope=col>{html.escape(word)} 1.0<br>" in page
    (badge,) = _badge.badges(report)
    title = xml.etree.ElementTree.fromstring(_badge.to_svg(badge))[0]
    assert title.text.startswith(f"{word} 1.0: ckpt-wrap")
    suite = xml.etree.ElementTree.fromstring(_junit.to_junit(report))[0]
    assert word in {found.get("value") for found in suite.iter("property")}


def test_implementation_of_which_nothing_was_run_has_no_column(make_report, registry):
    """It has a line that says why instead, also on the page."""
    nothing = {"CW-001": "not_provided", "CW-002": "not_provided"}
    late = make_report(
        nothing, name="late<b>", reason="late is for torch <2, but 2.13 is installed"
    )
    matrix = _matrix.matrix([make_report(), late], registry)
    assert [column.title for column in matrix.columns] == ["mine 1.0"]
    (line,) = matrix.left_out
    assert line == "late<b> 1.0 / cpu: late is for torch <2, but 2.13 is installed"
    assert f"- {_text.markdown(line)}" in _matrix.to_markdown(matrix)
    assert f"<li>{html.escape(line)}</li>" in _html.to_html(matrix, {})


def test_what_nobody_saw_is_grey_and_never_red(make_report, registry):
    """Red is kept for what was seen to be wrong, in the cells and in the verdicts."""
    shown = {}
    for outcome in ("not_run", "not_provided", "not_claimed", "no_device", "fail", "error"):
        matrix = _matrix.matrix([make_report({"CW-002": outcome})], registry)
        cell = _html.to_html(matrix, {}).partition('<tr id="CW-002"')[2]
        shown[outcome] = cell.partition('<td class="')[2].partition('"')[0]
    assert shown == {
        **dict.fromkeys(("not_run", "not_provided", "not_claimed", "no_device"), "unknown"),
        "fail": "bad",
        "error": "bad",
    }


def test_reports_of_two_suites_do_not_mix(make_report, registry):
    """One table is of one suite."""
    other = make_report()
    other["suite"]["version"] = "9"
    with pytest.raises(ReportError, match="2 reports are of 2 suites"):
        _matrix.matrix([make_report(), other], registry)


def test_shown_outcomes_are_all_outcomes():
    """Every outcome has a sign and a word of its own."""
    from torchparts_conformance.report._outcomes import OUTCOMES

    assert tuple(_matrix.SIGNS) == OUTCOMES
    assert len(set(_matrix.SIGNS.values())) == len(OUTCOMES)
    assert json.dumps(list(_matrix.SIGNS.values()))
