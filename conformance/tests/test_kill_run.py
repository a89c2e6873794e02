"""Running mutants: which files, in which process, and what is known of one that does not answer."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from torchparts_conformance import _console
from torchparts_conformance._errors import RegistryError
from torchparts_conformance.commands import _cli
from torchparts_conformance.mutation import _kill_run
from torchparts_conformance.requirements._registry import AREAS
from torchparts_conformance.subject import _isolation

HERE = Path(__file__).parent


MUTANTS = HERE / "mutants"


def _works_by(monkeypatch, code):
    """Have worker processes run this code instead of the suite's."""
    monkeypatch.setattr(_isolation, "command", lambda _: [sys.executable, "-c", code])


def test_every_file_of_mutants_belongs_to_one_area():
    """No file is run twice, and none is left out."""
    taken = [path for area in AREAS for path in _kill_run.mutant_files(MUTANTS, area)]
    assert sorted(taken) == sorted(MUTANTS.glob("*.py"))


@pytest.mark.slow
def test_a_mutant_is_run_and_caught_exactly(tmp_path):
    """The whole way of a mutant works; `torchparts-conformance mutants` runs all of them."""
    name = "mod_tracker_source.py"
    head, first, *_ = (MUTANTS / name).read_text().split("@mutant(")
    (tmp_path / name).write_text(f"{head}@mutant({first}")
    shutil.copytree(MUTANTS / "faults", tmp_path / "faults")
    (kill,) = _kill_run.kill(tmp_path, ["mod-tracker"])
    assert kill.is_exact
    assert [case.partition("::")[0] for case in kill.cases] == ["mod_tracker/test_source.py"]


FAULTS = """
from torchparts_conformance.mutants import mutant

@mutant(area="mod-tracker", kills={"MT-001"})
def exact(part):
    \"""Is caught as declared.\"""

@mutant(area="mod-tracker", kills={"MT-001"})
def leaking(part):
    \"""Is caught as declared only in a process of its own.\"""

@mutant(area="mod-tracker", kills={"MT-001"})
def harmless(part):
    \"""Is not broken at all.\"""

@mutant(area="mod-tracker", kills={"MT-001"})
def deadly(part):
    \"""Ends the process.\"""

@mutant(area="mod-tracker", kills={"MT-001"})
def silent(part):
    \"""Never answers.\"""
"""


WORKER = """
import json, sys, time
print(json.dumps({"ready": True}), flush=True)
for count, line in enumerate(sys.stdin):
    name = (json.loads(line)["mutant"] or "").rpartition("::")[2]
    if name == "deadly":
        sys.exit(3)
    if name == "silent":
        time.sleep(600)
    fails = name == "exact" or (name == "leaking" and count == 0)
    print(json.dumps({"failed": [["MT-001", "a::b"]] if fails else []}), flush=True)
"""


@pytest.fixture
def faults(tmp_path, monkeypatch):
    """Give a folder of five mutants, and a process that pretends to run them."""
    (tmp_path / "mod_tracker.py").write_text(FAULTS)
    _works_by(monkeypatch, WORKER)
    monkeypatch.setattr(_kill_run, "MUTANT_LIMIT_S", 1.0)
    return tmp_path


def test_mutants_are_told_apart(faults, capsys):
    """One that leaks is judged in a fresh process; one that ends or hangs its process is known."""
    kills = _kill_run.kill(faults, ["mod-tracker"], jobs=1)
    assert [kill.name for kill in kills if kill.is_exact] == ["exact", "leaking"]
    assert {kill.name: kill.failure for kill in kills if not kill.is_exact} == {
        "harmless": "",
        "deadly": "the process ended with code 3",
        "silent": "no answer in 1 s",
    }
    assert "[  1/5] mod-tracker exact: exactly as declared (" in capsys.readouterr().err


def test_results_are_remembered_but_failures_are_not(faults, monkeypatch):
    """A second run asks the cache, and runs again only what gave no result."""
    cache = faults / "cache.jsonl"
    first = _kill_run.kill(faults, ["mod-tracker"], cache=cache)
    monkeypatch.setattr(
        _isolation, "command", lambda _: [sys.executable, "-c", "raise SystemExit('no second run')"]
    )
    again = _kill_run.kill(faults, ["mod-tracker"], cache=cache)
    assert again[:3] == first[:3]
    assert all("did not start: no second run" in kill.failure for kill in again[3:])


ASKED = """
import json, sys
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    job = json.loads(line)
    ids = job["requirement"].split(",") if job["mutant"] else []
    print(json.dumps({"failed": [[id, "a::b"] for id in ids]}), flush=True)
"""


def test_mutants_are_held_to_the_requirements_that_were_asked_for(faults, monkeypatch, capsys):
    """One that fails another than it declares is told, and its whole declaration is not asked."""
    _works_by(monkeypatch, ASKED)
    declared = 'kills={"MT-001", "MT-003"}'
    (faults / "mod_tracker.py").write_text(FAULTS.replace('kills={"MT-001"}', declared, 1))
    command = ["mutants", str(faults), "--requirement"]
    assert _cli.main([*command, "mt-001"]) == 0
    assert "5 of 5 mutants caught exactly as declared" in capsys.readouterr().out
    assert _cli.main([*command, "MT-003"]) == _console.SUITE_BROKEN
    said = capsys.readouterr()
    assert "1 of 5 mutants caught exactly as declared" in said.out
    assert "mutant leaking of mod-tracker: declares [], but ['MT-003'] failed" in said.err
    assert _cli.main([*command, "MT-002"]) == _console.SUITE_BROKEN
    assert "MT-002 has no mutant" in capsys.readouterr().err


def test_page_of_kills_is_written_and_compared(faults, capsys, monkeypatch):
    """A page that was edited, or a case that fails no more, makes the check fail."""
    page = faults / "kill-matrix.md"
    command = ["mutants", str(faults), "--area", "mod-tracker", "--markdown", str(page)]
    assert _cli.main(command) == _console.SUITE_BROKEN  # two of the faults give no result
    assert "out of date" not in capsys.readouterr().err
    assert _cli.main([*command, "--check"]) == _console.SUITE_BROKEN
    assert "out of date" not in capsys.readouterr().err
    monkeypatch.setattr(
        _isolation,
        "command",
        lambda _: [sys.executable, "-c", WORKER.replace('["MT-001", "a::b"]', "")],
    )
    _cli.main([*command, "--check"])
    assert "kill-matrix.md is out of date" in capsys.readouterr().err


def test_suite_that_fails_without_a_mutant_shows_nothing(tmp_path, monkeypatch):
    """Where the working implementation fails, no mutant is judged."""
    monkeypatch.setattr(
        _isolation, "command", lambda _: [sys.executable, "-c", "raise SystemExit('broken')"]
    )
    with pytest.raises(RegistryError, match="without a mutant the process did not start: broken"):
        _kill_run.kill(tmp_path, ["mod-tracker"])


LEADER = """
import json, os, sys
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    leads = os.getpgid(0) == os.getpid()
    print(json.dumps({"failed": [["MT-001", "a::b"]]} if leads else {"failure": "led"}), flush=True)
"""


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="this system has no groups of processes")
def test_process_of_a_mutant_leads_those_that_it_starts(faults, monkeypatch):
    """So that they end with it, when it does not answer."""
    _works_by(monkeypatch, LEADER)
    head = FAULTS.partition('@mutant(area="mod-tracker", kills={"MT-001"})\ndef leaking')[0]
    (faults / "mod_tracker.py").write_text(head)
    monkeypatch.setattr(_kill_run, "_must_pass", lambda *_: None)
    (kill,) = _kill_run.kill(faults, ["mod-tracker"], jobs=1)
    assert kill.failure == ""


def test_processes_end_when_all_mutants_are_judged(faults, monkeypatch):
    """Also those that nobody uses any more, and whatever came out."""
    started = []

    class Noted(_kill_run.Worker):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            started.append(self)

    monkeypatch.setattr(_kill_run, "Worker", Noted)
    one = FAULTS.partition('@mutant(area="mod-tracker", kills={"MT-001"})\ndef leaking')[0]
    (faults / "mod_tracker.py").write_text(one)
    _kill_run.kill(faults, ["mod-tracker"], jobs=2)
    assert started
    assert [worker for worker in started if worker.process.poll() is None] == []
