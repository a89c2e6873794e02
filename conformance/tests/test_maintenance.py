"""Commands that keep the suite: its pages and its frozen list of cases."""

from __future__ import annotations

import dataclasses
import subprocess

import pytest

import torchparts_conformance
from torchparts_conformance._errors import RegistryError
from torchparts_conformance.commands import _cli, _maintenance
from torchparts_conformance.requirements import _history
from torchparts_conformance.requirements._registry import load_registry

VERSION = torchparts_conformance.__version__


@pytest.fixture
def lists(monkeypatch, tmp_path, frozen):
    """Give a folder of lists with that of the made-up suite, where the commands look for it."""
    for function in (_history.read, _history.versions, _history.write):
        monkeypatch.setattr(function, "__defaults__", (tmp_path,))
    _history.write(_history.make(VERSION, frozen.rows, load_registry(), cases=tmp_path))
    return tmp_path


@pytest.mark.parametrize(("changes", "code"), [({}, 0), ({"rows": ()}, 1), ({"files": {}}, 1)])
def test_frozen_list_is_the_collected_one(monkeypatch, frozen, capsys, lists, changes, code):
    """Every row and every file; `--check` writes nothing."""

    def collect(command, check):
        (path,) = (word.partition("=")[2] for word in command if word.startswith("--freeze="))
        made[path] = dataclasses.replace(frozen, **changes)
        return subprocess.CompletedProcess(command, 0)

    made = {}
    monkeypatch.setattr(_maintenance.subprocess, "run", collect)
    monkeypatch.setattr(_maintenance, "CASES", lists)
    load = lambda path=None: frozen if path is None else made[str(path)]  # noqa: E731
    monkeypatch.setattr(_maintenance._manifest, "load_manifest", load)
    assert _cli.main(["freeze", "--check"]) == code
    said = capsys.readouterr().err
    assert ("the cases are not those that were frozen" in said) is bool(code)


def test_list_is_frozen_as_it_was_collected(monkeypatch, frozen, lists):
    """Exit code 0; what pytest could not collect freezes nothing."""
    written, codes = [], [0, 1]
    (lists / f"{VERSION}.json").unlink()
    monkeypatch.setattr(_maintenance, "CASES", lists)
    monkeypatch.setattr(
        _maintenance.subprocess,
        "run",
        lambda command, check: subprocess.CompletedProcess(command, codes.pop(0)),
    )
    monkeypatch.setattr(_maintenance._manifest, "load_manifest", lambda path=None: frozen)
    monkeypatch.setattr(_maintenance._manifest, "freeze", written.append)
    assert _cli.main(["freeze"]) == 0
    assert written == [frozen.rows]
    assert _history.read(VERSION).rows == frozen.rows
    assert _cli.main(["freeze"]) != 0
    assert written == [frozen.rows]


def test_list_that_is_not_of_its_manifest_is_seen(monkeypatch, frozen, lists, capsys):
    """A list that lacks a row is out of date, and `--check` says so."""
    ended = subprocess.CompletedProcess([], 0)
    monkeypatch.setattr(_maintenance.subprocess, "run", lambda command, check: ended)
    monkeypatch.setattr(_maintenance._manifest, "load_manifest", lambda path=None: frozen)
    monkeypatch.setattr(_maintenance, "CASES", lists)
    assert _cli.main(["freeze", "--check"]) == 0
    _history.write(_history.make(VERSION, frozen.rows[:1], load_registry(), cases=lists))
    assert _cli.main(["freeze", "--check"]) == 1
    assert "the cases are not those that were frozen" in capsys.readouterr().err


def test_list_of_another_version_is_never_frozen_again(monkeypatch, frozen):
    """One that was changed or taken away stops the command; this version's own does not."""
    files = {"lists/0.0.1.json": "1", f"lists/{VERSION}.json": "2"}
    known = dataclasses.replace(frozen, files=files)
    now = {**files, f"lists/{VERSION}.json": "3"}
    monkeypatch.setattr(_maintenance._manifest, "file_fingerprints", lambda: now)
    _maintenance._refuse_changed_lists(known)
    for changed in ({**now, "lists/0.0.1.json": "4"}, {}):
        monkeypatch.setattr(_maintenance._manifest, "file_fingerprints", lambda c=changed: c)
        with pytest.raises(RegistryError, match=r"freeze: lists/0\.0\.1\.json is not the one"):
            _maintenance._refuse_changed_lists(known)


def test_requirement_pages_are_written_and_then_up_to_date(tmp_path, capsys):
    """Exit code 0 for both, and 1 once a page was changed by hand."""
    assert _cli.main(["spec", str(tmp_path)]) == 0
    assert _cli.main(["spec", "--check", str(tmp_path)]) == 0
    page = min(tmp_path.rglob("*.md"))
    assert page.name == "spec-ckpt-wrap.md"
    assert "CW-001" in page.read_text()
    assert "MT-001" not in page.read_text()
    page.write_text("by hand")
    assert _cli.main(["spec", "--check", str(tmp_path)]) == 1
    assert f"{page.name} is out of date; write it again" in capsys.readouterr().err
