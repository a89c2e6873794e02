"""Broken implementations: each is caught by what it declares; nothing-doers pass nothing."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from torchparts_conformance import _commands, _kill, _report
from torchparts_conformance._errors import RegistryError
from torchparts_conformance._registry import AREAS, CLAIMED_BY_ALL, folder_of, load_registry
from torchparts_conformance.mutants import find_mutants, mutant, overlay

HERE = Path(__file__).parent
MUTANTS = HERE / "mutants"


def _declared():
    return [
        found
        for area in AREAS
        for path in sorted(MUTANTS.glob(f"{folder_of(area)}*.py"))
        for found in find_mutants(path)
    ]


def test_every_must_of_core_and_robust_has_a_mutant():
    """No MUST is only known to pass."""
    killed = {id for found in _declared() for id in found.kills}
    bare = [
        r.id
        for r in load_registry().values()
        if r.level == "MUST" and r.profile in CLAIMED_BY_ALL and r.id not in killed
    ]
    assert bare == []


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


def test_inexact_mutant_and_bare_requirement_are_problems(registry):
    """A mutant that is not caught as declared, or a MUST without one, is reported."""
    kill = _kill.Kill("ckpt-wrap", "wrong", "Wrong.", ("CW-002",), ("CW-001", "CW-002"))
    problems = _kill.problems([kill], registry)
    assert problems == [
        "mutant wrong of ckpt-wrap declares ['CW-002'], but ['CW-001', 'CW-002'] failed",
        "CW-001 has no mutant",
    ]
    assert "kills 0 of 1 mutants exactly" in _kill.to_markdown([kill], "1")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["do_nothing", "always_raise"])
def test_degenerate_implementation_passes_nothing(name, monkeypatch, tmp_path):
    """Neither doing nothing nor always raising satisfies a single requirement."""
    command = [*_commands.pytest_command(), f"--impl=degenerate:{name}", f"--out={tmp_path}"]
    monkeypatch.setenv("PYTHONPATH", str(HERE), prepend=":")
    subprocess.run(command, check=False, capture_output=True, timeout=300)
    rows = _report.read(tmp_path / "report.json")["rows"]
    judged = [row for row in rows if row["profile"] in CLAIMED_BY_ALL]
    assert judged
    assert [(row["id"], row["case"]) for row in judged if row["outcome"] == "pass"] == []


@pytest.mark.slow
def test_a_mutant_is_run_and_caught_exactly(tmp_path):
    """The whole way of a mutant works; `torchparts-conformance mutants` runs all of them."""
    first = _first_mutant((MUTANTS / "combined.py").read_text())
    (tmp_path / "combined.py").write_text(first)
    (kill,) = _kill.kill(tmp_path, ["combined"])
    assert kill.is_exact


def _first_mutant(text: str) -> str:
    head, first, *_ = text.split("@mutant(")
    return f"{head}@mutant({first}"
