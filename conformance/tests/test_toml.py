"""TOML is read with the same result on every Python."""

from __future__ import annotations

import datetime

import pytest

from torchparts_conformance import _toml


def test_document_is_read():
    """Tables, lists of tables and days have their own types."""
    text = '[[run]]\nday = 2026-11-22\nby = "x"\n[table]\nwhole = 1\n'
    assert _toml.parse(text) == {
        "run": [{"day": datetime.date(2026, 11, 22), "by": "x"}],
        "table": {"whole": 1},
    }


@pytest.mark.parametrize("text", ["a =", "a = 1\na = 2", "[t", "a = 2026-13-40"])
def test_what_is_no_toml_is_a_value_error(text):
    """Whoever reads a stranger's file catches that, and nothing of the library's own."""
    with pytest.raises(ValueError):
        _toml.parse(text)
