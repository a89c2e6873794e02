"""The matrix: what it shows, and that nothing in it is ever taken for markup."""

from __future__ import annotations

import html
import html.parser
import json
import os
import shutil
import subprocess
import xml.etree.ElementTree

import pytest

from torchparts_conformance._errors import ReportError
from torchparts_conformance.render import _badge, _html, _junit, _matrix, _text

EVIL = "<img src=x onerror=document.title='owned'>\"'&|\x1b]0;x\x07\u202e"


@pytest.fixture
def page(make_report, registry):
    """Give the page of two implementations, one of them hostile."""
    reports = [
        make_report({"CW-001": "fail", "CW-002": "error"}, name=EVIL, reason=EVIL),
        make_report(name="good", devices=("cpu", "cuda")),
    ]
    matrix = _matrix.matrix(reports, registry)
    return _html.to_html(matrix, {}, {})


def test_markdown_has_a_word_for_every_cell(make_report, registry):
    """Each device that was asked about has its column, and the others have none."""
    matrix = _matrix.matrix([make_report({"CW-001": "fail"}, name="a|b")], registry)
    text = _matrix.to_markdown(matrix)
    assert "| profile | a&#124;b 1.0 / cpu |\n" in text
    assert "| ckpt-wrap core | not conformant 0/1 |\n" in text
    both = _matrix.matrix([make_report(devices=("cpu", "cuda"))], registry)
    assert "| profile | mine 1.0 / cpu | mine 1.0 / cuda |" in _matrix.to_markdown(both)
    assert "\N{BALLOT X} fail" in text


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
    assert html.unescape(text).count(word) == 5
    assert text.replace(_text.markdown(word), "") == plain.replace("mine", "").replace(
        "Suite 0.1.0", "Suite "
    ).replace(" 1.0 / ", "  / ")
    assert not set(_text.markdown(word)) & set("[]<>`*_|!~@:\\{}")
    assert "www." not in _text.markdown(word)


@pytest.mark.parametrize("word", MARKUP)
def test_pages_and_pictures_take_nothing_from_a_report_for_markup(make_report, registry, word):
    """The same words in the page, the badge and JUnit's file come back out as they were."""
    report = make_report({"CW-001": "fail"}, name=word, reason=word)
    page = _html.to_html(_matrix.matrix([report], registry), {}, {})
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
    assert f"<li>{html.escape(line)}</li>" in _html.to_html(matrix, {}, {})


def test_what_nobody_saw_is_grey_and_never_red(make_report, registry):
    """Red is kept for what was seen to be wrong, in the cells and in the verdicts."""
    shown = {}
    for outcome in ("not_run", "not_provided", "not_claimed", "no_device", "fail", "error"):
        matrix = _matrix.matrix([make_report({"CW-002": outcome})], registry)
        cell = _html.to_html(matrix, {}, {}).partition('<tr id="CW-002"')[2]
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


class _Reader(html.parser.HTMLParser):
    """Collects the tags and attributes of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs


def test_page_has_no_markup_from_a_report(page):
    """Hostile names and reasons are text: no tag, no handler, no address comes from them."""
    read = _Reader(page)
    assert "img" not in read.tags
    assert read.tags.count("script") == 1
    assert not [name for name, _ in read.attributes if name.startswith("on")]
    assert not [
        value for name, value in read.attributes if name in ("src", "href") and value[0] != "#"
    ]
    assert "\x1b" not in page
    assert "\u202e" not in page


def test_page_reads_without_colour_and_with_a_keyboard(page):
    """Every cell has a word, headers have a scope, and only native controls are used."""
    read = _Reader(page)
    assert "\N{BALLOT X} fail" in page
    assert "\N{CHECK MARK} pass" in page
    assert {"details", "summary", "input", "select", "caption"} <= set(read.tags)
    assert "div" not in read.tags
    assert page.count("scope=col") == 8
    assert page.index('id="verdicts"') < page.index("<form") < page.index('id="requirements"')


def test_page_is_read_on_a_narrow_screen(page):
    """Below 700 px a row is a block, and each of its cells names its column."""
    assert "@media (max-width:700px)" in page
    cells = page.count("<td ")
    assert cells == page.count('data-label="') > 0
    assert "td::before{content:attr(data-label)" in page


BROWSERS = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
)


@pytest.fixture
def chromium():
    """Give the command of a Chromium; where the suite is released there has to be one."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None and os.environ.get("TORCHPARTS_BROWSER") == "required":
        pytest.fail(f"none of {BROWSERS} is installed, but the page must be opened in a browser")
    if found is None:
        pytest.skip("no Chromium is installed: the page was not opened in a browser")
    return found


@pytest.mark.slow
def test_page_in_a_browser_filters_and_executes_nothing(page, chromium, tmp_path):
    """In Chromium the filter works, the policy holds and no word of a report becomes code."""
    path = tmp_path / "matrix.html"
    path.write_text(page, encoding="utf-8")
    whole = _dom(chromium, path.as_uri(), tmp_path)
    assert "2 of 2 requirements" in whole
    assert "<title>torchparts conformance 0.1.0</title>" in whole
    assert "<img" not in whole
    filtered = _dom(chromium, path.as_uri() + "#should", tmp_path)
    assert "1 of 2 requirements" in filtered
    assert filtered.count("hidden") > whole.count("hidden")


@pytest.mark.slow
def test_published_page_opens_in_a_browser(chromium, package, tmp_path):
    """The page in the documentation shows every requirement, and finds one by its id."""
    path = package.parents[2] / "docs" / "conformance" / "matrix.html"
    count = path.read_text(encoding="utf-8").count('<tr id="')
    assert f"{count} of {count} requirements" in _dom(chromium, path.as_uri(), tmp_path)
    assert f"1 of {count} requirements" in _dom(chromium, path.as_uri() + "#CW-001", tmp_path)


def _dom(chromium, address, folder):
    command = [
        *(chromium, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"),
        *(f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=2000", address),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return ended.stdout


def test_shown_outcomes_are_all_outcomes():
    """Every outcome has a sign and a word of its own."""
    from torchparts_conformance.report._outcomes import OUTCOMES

    assert tuple(_matrix.SIGNS) == OUTCOMES
    assert len(set(_matrix.SIGNS.values())) == len(OUTCOMES)
    assert json.dumps(list(_matrix.SIGNS.values()))
