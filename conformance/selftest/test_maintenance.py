"""Commands that keep the suite: its pages and its frozen list of cases."""

from __future__ import annotations

import dataclasses
import subprocess

import pytest

from torchparts_conformance.commands import _cli, _maintenance


@pytest.mark.parametrize(("changes", "code"), [({}, 0), ({"rows": ()}, 1), ({"files": {}}, 1)])
def test_frozen_list_is_the_collected_one(monkeypatch, frozen, capsys, changes, code):
    """Every row and every file; `--check` writes nothing."""

    def collect(command, check):
        (path,) = (word.partition("=")[2] for word in command if word.startswith("--freeze="))
        made[path] = dataclasses.replace(frozen, **changes)
        return subprocess.CompletedProcess(command, 0)

    made = {}
    monkeypatch.setattr(_maintenance.subprocess, "run", collect)
    load = lambda path=None: frozen if path is None else made[str(path)]  # noqa: E731
    monkeypatch.setattr(_maintenance._manifest, "load_manifest", load)
    assert _cli.main(["freeze", "--check"]) == code
    said = capsys.readouterr().err
    assert ("the cases are not those that were frozen" in said) is bool(code)


def test_list_is_frozen_as_it_was_collected(monkeypatch, frozen):
    """Exit code 0; what pytest could not collect freezes nothing."""
    written, codes = [], [0, 1]
    monkeypatch.setattr(
        _maintenance.subprocess,
        "run",
        lambda command, check: subprocess.CompletedProcess(command, codes.pop(0)),
    )
    monkeypatch.setattr(_maintenance._manifest, "load_manifest", lambda path=None: frozen)
    monkeypatch.setattr(_maintenance._manifest, "freeze", written.append)
    assert _cli.main(["freeze"]) == 0
    assert written == [frozen.rows]
    assert _cli.main(["freeze"]) != 0
    assert written == [frozen.rows]


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
