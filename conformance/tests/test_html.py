"""The page of the matrix takes no markup from a report, and reads without colour."""

from __future__ import annotations

import html
import html.parser
import os
import re
import shutil
import subprocess

import pytest

from torchparts_conformance.render import _html, _matrix

EVIL = "<img src=x onerror=document.title='owned'>\"'&|\x1b]0;x\x07\u202e"


@pytest.fixture
def page(make_report, registry):
    """Give the page of two implementations, one of them hostile."""
    reports = [
        make_report({"CW-001": "fail", "CW-002": "error"}, name=EVIL, reason=EVIL),
        make_report(name="good", devices=("cpu", "cuda")),
    ]
    matrix = _matrix.matrix(reports, registry)
    return _html.to_html(matrix, {})


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
    assert page.count("scope=col") == 11
    parts = ('id="overview"', 'id="verdicts"', "<form", 'id="requirements"')
    assert sorted(parts, key=page.index) == list(parts)


def test_overview_counts_what_each_claims_and_has(make_report, registry):
    """Sums over the verdicts, and an address that shows what fails, where something does."""
    reports = [make_report({"CW-001": "fail"}, name="a b"), make_report(name="good")]
    one, other = _matrix.matrix(reports, registry).columns
    assert (one.areas, one.passed, one.total) == (("ckpt-wrap",), 0, 1)
    assert (other.passed, other.total) == (1, 1)
    rows = _html.to_html(_matrix.matrix(reports, registry), {}).partition('id="overview"')[2]
    first, second = rows.split("<tr><th scope=row>")[1:3]
    assert 'href="#implementation=a%20b%201.0%2C%20cpu&amp;level=MUST&amp;outcome=bad"' in first
    assert "</meter> 0/1" in first and "outcome=" not in second.partition("</table>")[0]


def test_what_no_area_has_needs_no_opening(make_report, registry):
    """That an area is not provided is the cell's own word; any other reason can be read."""
    for reason, opened in (("ckpt-wrap is not provided", 0), ("there is no policy", 1)):
        report = make_report({"CW-001": "not_provided"}, reason=reason)
        page = _html.to_html(_matrix.matrix([report], registry), {})
        cell = page.partition('<tr id="CW-001"')[2].partition("</tr>")[0].partition("</th>")[2]
        assert cell.count("<details>") == opened


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
    good = _dom(
        chromium, path.as_uri() + "#implementation=good%201.0%2C%20cpu&outcome=bad", tmp_path
    )
    assert "0 of 2 requirements" in good
    wrong = _dom(chromium, path.as_uri() + "#outcome=bad", tmp_path)
    assert "2 of 2 requirements" in wrong


MEASURE = """
<title>measured</title><script>onload = () => {
  const inside = document.querySelector("iframe").contentWindow;
  const caption = inside.document.querySelector("#requirements caption");
  const wide = inside.document.documentElement.scrollWidth;
  document.title = wide + " wide, caption " + caption.offsetWidth;
};</script><iframe src="matrix.html" style="width:400px;height:800px;border:0"></iframe>
"""


@pytest.mark.slow
def test_nothing_is_wider_than_a_narrow_screen(page, chromium, tmp_path):
    """At 400 px, with all evidence open and an address in it that has no place to break."""
    opened = page.replace(
        "<details", f"<details open><summary>x</summary>{'x' * 300}</details><details"
    )
    (tmp_path / "matrix.html").write_text(opened, encoding="utf-8")
    (tmp_path / "outer.html").write_text(MEASURE, encoding="utf-8")
    seen = _dom(chromium, (tmp_path / "outer.html").as_uri(), tmp_path)
    wide, caption = map(int, re.findall(r"<title>(\d+) wide, caption (\d+)", seen)[0])
    assert wide <= 400
    assert caption > 300


def _dom(chromium, address, folder):
    command = [
        *(chromium, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"),
        "--allow-file-access-from-files",
        *(f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=2000", address),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return ended.stdout
