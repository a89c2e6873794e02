"""Broken implementations: each is caught by what it declares; nothing-doers pass nothing."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from torchparts_conformance import _console
from torchparts_conformance._errors import RegistryError
from torchparts_conformance.commands import _cli
from torchparts_conformance.mutants import find_mutants, mutant, overlay
from torchparts_conformance.mutation import _kill, _kill_run, _kill_store
from torchparts_conformance.requirements._registry import AREAS, CLAIMED_BY_ALL, load_registry
from torchparts_conformance.subject import _isolation

HERE = Path(__file__).parent
MUTANTS = HERE / "mutants"


def _works_by(monkeypatch, code):
    """Have worker processes run this code instead of the suite's."""
    monkeypatch.setattr(_isolation, "command", lambda _: [sys.executable, "-c", code])


def _declared():
    return [
        found
        for area in AREAS
        for path in _kill_run.mutant_files(MUTANTS, area)
        for found in find_mutants(path)
    ]


def test_every_must_of_core_and_robust_has_a_mutant():
    """No MUST is only known to pass."""
    killed = [id for found in _declared() for id in found.kills]
    assert _kill.bare_requirements(killed, load_registry()) == []
    assert "CW-001" in _kill.bare_requirements((), load_registry())


def test_every_must_of_sharded_training_has_a_mutant():
    """What others' sharding is held to has one for each, too."""
    registry = {id: r for id, r in load_registry().items() if r.profile == "distributed"}
    assert len(registry) > 20
    assert _kill.unbroken((id for found in _declared() for id in found.kills), registry) == []


def test_every_must_of_combined_has_a_mutant():
    """The area that is about all parts has one for its capabilities too."""
    registry = {id: r for id, r in load_registry().items() if r.area == "combined"}
    assert _kill.unbroken((id for found in _declared() for id in found.kills), registry) == []


def test_mutants_declare_requirements_that_exist():
    """A mutant names ids of its own area."""
    registry = load_registry()
    strays = [
        (found.name, id)
        for found in _declared()
        for id in found.kills
        if id not in registry or registry[id].area != found.area
    ]
    assert strays == []


def test_overlay_replaces_names_that_exist():
    """The rest of the part is untouched, and a name that is not there cannot be replaced."""
    part = SimpleNamespace(a=1, b=2)
    changed = overlay(part, a=3)
    assert (changed.a, changed.b, part.a) == (3, 2, 1)
    assert {"a", "b"} <= set(dir(changed))
    with pytest.raises(AttributeError):
        overlay(part, c=1)


@pytest.mark.parametrize(
    "arguments", [{"area": "wheels", "kills": {"X"}}, {"area": "ckpt-wrap", "kills": ()}]
)
def test_incomplete_mutant_is_refused(arguments):
    """A mutant says where it is put, what it breaks and what has to notice."""
    with pytest.raises(RegistryError, match="needs a known area, at least one id and a docstring"):
        mutant(**arguments)(lambda part: part)


def test_every_file_of_mutants_belongs_to_one_area():
    """No file is run twice, and none is left out."""
    taken = [path for area in AREAS for path in _kill_run.mutant_files(MUTANTS, area)]
    assert sorted(taken) == sorted(MUTANTS.glob("*.py"))


def test_inexact_mutant_and_bare_requirement_are_problems(registry):
    """A mutant that is not caught as declared, or a MUST without one, is reported."""
    kill = _kill.Kill("ckpt-wrap", "wrong", "Wrong.", ("CW-002",), ("CW-001", "CW-002"), ("a::b",))
    lost = _kill.Kill("ckpt-wrap", "lost", "Lost.", ("CW-002",), (), failure="no answer in 1 s")
    problems = _kill.problems([kill, lost], registry)
    assert problems == [
        "mutant wrong of ckpt-wrap: declares ['CW-002'], but ['CW-001', 'CW-002'] failed",
        "mutant lost of ckpt-wrap: no answer in 1 s",
        "CW-001 has no mutant",
    ]


def test_page_of_kills_names_what_nothing_made_fail(registry):
    """What is exact is counted; what no mutant breaks and what never failed is named."""
    exact = _kill.Kill("ckpt-wrap", "wrong", "Wrong.", ("CW-002",), ("CW-002",), ("a::b", "a::c"))
    page = _kill.to_markdown([exact], registry, {"a::b", "a::c", "a::d"}, "1")
    assert "kills 1 of 1 mutants exactly as declared. They break 0 of 1 MUST" in page
    assert "| CW-002 | exactly these | 2 |" in page
    assert page.endswith(
        "MUST requirements that no mutant is declared to break:\n\n- `CW-001`\n\n"
        "Cases that no mutant made fail:\n\n- `a::d`\n"
    )
    assert "Cases that" not in _kill.to_markdown([exact], registry, {"a::b"}, "1")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["do_nothing", "always_raise"])
def test_degenerate_implementation_passes_nothing(name, control_rows):
    """Neither doing nothing nor always raising satisfies a single requirement."""
    rows = control_rows[f"degenerate:{name}"]
    judged = [row for row in rows if row["profile"] in CLAIMED_BY_ALL]
    assert judged
    assert [(row["id"], row["case"]) for row in judged if row["outcome"] == "pass"] == []


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


def test_key_of_a_result_changes_with_what_decides_it(tmp_path):
    """Another mutant, another file content or another area's fingerprint is another key."""
    path = tmp_path / "faults.py"
    path.write_text("a")
    keys = [_kill_store.key("f", path, "one"), _kill_store.key("f", path, "two")]
    keys += [_kill_store.key("g", path, "one"), _kill_store.key("f", path, "")]
    path.write_text("b")
    keys.append(_kill_store.key("f", path, "one"))
    assert len(set(keys)) == len(keys)


def test_cut_cache_is_read_as_far_as_it_goes(tmp_path):
    """A run that was ended while it wrote loses one result."""
    path = tmp_path / "cache.jsonl"
    _kill_store.Store(path).put("k", [("CW-001", "a::b")])
    path.write_text(path.read_text() + '{"key": "l", "fai')
    store = _kill_store.Store(path)
    assert store.get("k") == [("CW-001", "a::b")]
    assert store.get("l") is None


def test_suite_that_fails_without_a_mutant_shows_nothing(tmp_path, monkeypatch):
    """Where the working implementation fails, no mutant is judged."""
    monkeypatch.setattr(
        _isolation, "command", lambda _: [sys.executable, "-c", "raise SystemExit('broken')"]
    )
    with pytest.raises(RegistryError, match="without a mutant the process did not start: broken"):
        _kill_run.kill(tmp_path, ["mod-tracker"])


def test_mutant_is_told_by_the_first_line_of_its_docstring():
    """Also where that is the only one."""

    @mutant(area="ckpt-wrap", kills={"CW-001"})
    def wrong(part):
        """Is wrong."""

    @mutant(area="ckpt-wrap", kills={"CW-001"})
    def worse(part):
        """Is worse.

        Much worse.
        """

    assert (wrong.text, worse.text) == ("Is wrong.", "Is worse.")


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
