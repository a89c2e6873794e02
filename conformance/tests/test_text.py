"""Words of a stranger are text of a page: every sign that could be markup is written otherwise."""

from __future__ import annotations

import html
import string

import pytest

from torchparts_conformance.render import _text


@pytest.mark.parametrize("text", ["plain words, 1.0+cpu (it's 50% of a/b; why?)", ""])
def test_what_is_no_markup_stays(text):
    """Versions, reasons and sentences read as they were written."""
    assert _text.markdown(text) == text


@pytest.mark.parametrize("sign", sorted(set(string.punctuation) - set("-.,/+()'%;?")))
def test_sign_that_could_be_markup_is_a_reference_to_it(sign):
    """A reader shows the sign, and takes nothing for the start of anything."""
    written = _text.markdown(f"a{sign}b")
    assert written == f"a&#{ord(sign)};b"
    assert html.unescape(written) == f"a{sign}b"


@pytest.mark.parametrize("start", ["www.", "WWW.", "wWw."])
def test_address_without_a_scheme_is_no_link(start):
    """The dot that makes it one is a reference; any other dot stays."""
    written = _text.markdown(f"{start}example.org")
    assert written == f"{start[:-1]}&#46;example.org"


def test_text_is_one_line():
    """A line of its own could begin a list, a heading or a table."""
    assert _text.markdown("  a\n- b\t c\r\n") == "a - b c"
