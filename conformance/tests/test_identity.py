"""How the code under test is named: by its wheel where it came from one, else by its source."""

from __future__ import annotations

import base64
import hashlib
import importlib
import importlib.metadata
import json
import zipfile
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


def test_adapter_is_known_by_its_file():
    """By short name or address, once it was imported; nothing else has one."""
    found = _identity.adapter_file("torchparts_conformance.adapters.ours:impl")
    assert found is None or found.name == "ours.py"
    importlib.import_module("torchparts_conformance.adapters.ours")
    file = _identity.adapter_file("ours")
    assert file is not None
    assert file.parts[-2:] == ("adapters", "ours.py")
    assert _identity.adapter_file("torchparts_conformance.adapters.ours:anything") == file
    assert _identity.adapter_file("nobody.imported:this") is None
    assert _identity.adapter_file("sys:path") is None


def test_source_of_what_is_not_there_is_not_known(tmp_path, monkeypatch):
    """Nor that of a module without a package; a package is its files, by name and content."""
    (tmp_path / "made_up_module.py").write_text("")
    package = tmp_path / "made_up_package"
    package.mkdir()
    (package / "__init__.py").write_text("a = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    kinds = ("nobody-has-this", "made-up-module", "made-up-package")
    found = [_identity.describe_distribution(name) for name in kinds]
    assert [each["kind"] for each in found] == ["none", "none", "source"]
    before = found[-1]["sha256"]
    (package / "__init__.py").write_text("a = 2\n")
    assert _identity.describe_distribution("made-up-package")["sha256"] != before


def test_distribution_with_a_dotted_name_needs_no_parent_package():
    """A name that no import finds is described, not looked for in a package that is not there."""
    described = _identity.describe_distribution("nobody.has-this")
    assert (described["version"], described["kind"]) == (None, "none")


@pytest.fixture
def wheel(tmp_path):
    """Give a function that writes a wheel: a module, and what its RECORD says of it."""

    def write(text, noted=None, more=()):
        digest = hashlib.sha256((noted or text).encode()).digest()
        line = f"mine.py,sha256={base64.urlsafe_b64encode(digest).decode().rstrip('=')},{len(text)}"
        path = tmp_path / "mine-1.0-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("mine.py", text)
            for name in more:
                archive.writestr(name, text)
            archive.writestr("mine-1.0.dist-info/RECORD", f"{line}\nmine-1.0.dist-info/RECORD,,\n")
        return path, line

    return write


def test_wheel_is_known_as_what_is_installed_from_it(wheel):
    """Whatever the installer writes beside it."""
    path, line = wheel("answer = 42\n")
    installed = f"mine-1.0.dist-info/INSTALLER,sha256=abc,3\nmine-1.0.dist-info/RECORD,,\n{line}\n"
    assert _identity.wheel_record_sha256(path) == _identity.record_sha256(installed)


def test_wheel_whose_record_is_not_true_is_not_known(wheel, tmp_path):
    """Another file under its name, one more file, and what is no wheel at all."""
    assert _identity.wheel_record_sha256(wheel("answer = 43\n", noted="answer = 42\n")[0]) is None
    assert _identity.wheel_record_sha256(wheel("answer = 42\n", more=["torch.py"])[0]) is None
    (tmp_path / "text.whl").write_text("none")
    assert _identity.wheel_record_sha256(tmp_path / "text.whl") is None
