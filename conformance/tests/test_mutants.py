"""Broken implementations: declaration, shared code, running; every requirement has one."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from torchparts_conformance import _cli, _mutation
from torchparts_conformance._errors import RegistryError
from torchparts_conformance.mutants import find_mutants, load_mutant, mutant, overlay
from torchparts_conformance.requirements._areas import AREAS
from torchparts_conformance.requirements._cases import load_registry

BROKEN = Path(__file__).parent / "broken"


def _declared():
    return [
        found
        for area in AREAS
        for path in _mutation.mutant_files(BROKEN, area)
        for found in find_mutants(path)
    ]


def test_every_requirement_has_a_broken_implementation():
    broken = {id for found in _declared() for id in found.kills}
    assert load_registry().keys() - broken == set()


def test_mutants_name_requirements():
    assert {id for found in _declared() for id in found.kills} <= load_registry().keys()


def test_overlay_replaces_names_that_exist():
    part = SimpleNamespace(a=1, b=2)
    changed = overlay(part, a=3)
    assert (changed.a, changed.b, part.a) == (3, 2, 1)
    assert {"a", "b"} <= set(dir(changed))
    with pytest.raises(AttributeError):
        overlay(part, c=1)


@pytest.mark.parametrize("kills", ["", "CW-001 MT-001", "CW-001"])
def test_incomplete_mutant_is_refused(kills):
    with pytest.raises(RegistryError, match="needs ids of one area, and a docstring"):
        mutant(kills)(lambda part: part)


def test_text_of_a_mutant_is_the_first_line_of_its_docstring():
    @mutant("CW-001")
    def worse(part):
        """Is worse.

        Much worse.
        """

    assert worse.text == "Is worse."


def test_mutant_that_is_not_there_is_refused(tmp_path):
    (tmp_path / "empty.py").write_text("")
    with pytest.raises(RegistryError, match="the file declares no such mutant"):
        load_mutant(f"{tmp_path}/empty.py::nothing")
    with pytest.raises(RegistryError, match=r"mutants file 'none\.py' is not a Python file"):
        load_mutant(f"{tmp_path}/none.py::nothing")


SHARED = """
def broken(part):
    kind = type("Broken", (), {"value": part.value + 1})
    kind.__module__, kind.__qualname__ = __name__, "Broken"
    globals()["Broken"] = kind
    return kind
"""
MUTANT = """
from torchparts_conformance.mutants import mutant

from .faults.wheels import broken


@mutant("SP-001")
def %s(part):
    "Broken."
    return broken(part)
"""


def _folder(path):
    (path / "faults").mkdir(parents=True)
    (path / "faults" / "wheels.py").write_text(SHARED)
    for name in ("front", "back"):
        (path / f"{name}.py").write_text(MUTANT % name)
    return path


def test_files_of_a_folder_share_code(tmp_path):
    _folder(tmp_path / "one")
    front, back = (load_mutant(f"{tmp_path}/one/{name}.py::{name}") for name in ("front", "back"))
    first, second = (fault.apply(SimpleNamespace(value=1)) for fault in (front, back))
    assert first.value == second.value == 2
    assert first.__module__ == second.__module__
    assert pickle.loads(pickle.dumps(second)) is second
    other = load_mutant(f"{_folder(tmp_path / 'two')}/front.py::front")
    assert other.apply(SimpleNamespace(value=1)).__module__ != first.__module__
    assert not any(str(tmp_path) in entry for entry in sys.path)


FAULTS = """
from torchparts_conformance.mutants import mutant, overlay


@mutant("CW-008")
def caught(part):
    "Wrapping raises."
    def checkpoint_wrapper(*args, **kwargs):
        raise RuntimeError
    return overlay(part, checkpoint_wrapper=checkpoint_wrapper)


@mutant("CW-008")
def harmless(part):
    "Nothing is wrong."
    return part


@mutant("CW-008")
def deadly(part):
    "Ends the process."
    import os
    os._exit(3)
"""


@pytest.mark.slow
def test_faults_are_tried_and_those_that_pass_are_named(tmp_path, capsys):
    (tmp_path / "ckpt_wrap_some.py").write_text(FAULTS)
    assert _cli.main(["mutants", str(tmp_path), "--area", "ckpt-wrap", "--jobs", "1"]) == 5
    said = capsys.readouterr()
    assert "1 of 3 broken implementations caught" in said.out
    assert "harmless of ckpt-wrap: NOT CAUGHT by CW-008" in said.err
    assert "deadly of ckpt-wrap: the process ended with code 3" in said.err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--requirement", "CW-999"], "--requirement 'CW-999' is unknown"),
        (["--requirement", "CW-001", "--area", "ckpt-wrap"], "Give one of them"),
        (["--area", "wheels"], "--area 'wheels' is unknown"),
        (["--jobs", "0"], "--jobs is 0"),
    ],
)
def test_bad_option_is_exit_code_4(capsys, options, said):
    assert _cli.main(["mutants", str(BROKEN), *options]) == 4
    assert said in capsys.readouterr().err
