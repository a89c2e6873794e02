"""How the code under test is named: by its wheel where it came from one, else by its source."""

from __future__ import annotations

import importlib.metadata
import json
from types import SimpleNamespace

import pytest

from torchparts_conformance.subject import _identity

RECORD = "mine/__init__.py,sha256=abc,10\nmine-1.0.dist-info/RECORD,,\n"
EDITABLE = json.dumps({"url": "file:///x", "dir_info": {"editable": True}})
ARCHIVE = json.dumps({"url": "file:///x.whl", "archive_info": {"hashes": {"sha256": "5" * 64}}})


@pytest.fixture
def installed(monkeypatch):
    """Give a function that says what is installed of one distribution."""

    def say(**files):
        texts = {"RECORD": RECORD, "direct_url.json": None} | files
        found = SimpleNamespace(version="1.0", read_text=texts.get)
        monkeypatch.setattr(importlib.metadata, "distribution", lambda name: found)
        return _identity.describe_distribution("torchparts_conformance")

    return say


def test_wheel_from_an_index_is_known_by_its_record(installed):
    """Without a note of where it came from, the file is not known."""
    found = installed()
    assert (found["kind"], found["version"]) == ("record", "1.0")
    assert found["sha256"] == _identity.record_sha256(RECORD)
    assert found["wheel_sha256"] is None


def test_wheel_from_a_file_names_the_file(installed):
    """The installer noted which one."""
    found = installed(**{"direct_url.json": ARCHIVE})
    assert (found["kind"], found["wheel_sha256"]) == ("record", "5" * 64)


@pytest.mark.parametrize("files", [{"direct_url.json": EDITABLE}, {"RECORD": None}])
def test_source_is_known_by_its_files(installed, files):
    """What is edited in place has no record of itself, whatever was installed."""
    found = installed(**files)
    assert (found["kind"], found["wheel_sha256"]) == ("source", None)
    assert len(found["sha256"]) == 64


def test_words_are_printable_and_never_empty():
    """Control characters are replaced, and long words cut."""
    assert _identity.printable("") == "-"
    assert _identity.printable("a\x1b[1m") != "a\x1b[1m"
    assert len(_identity.printable("x" * 1000)) == _identity.MAX_WORD
    assert len(_identity.printable("x" * 1000, limit=200)) == 200
