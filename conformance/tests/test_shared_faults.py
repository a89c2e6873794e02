"""Files of broken implementations share what lies in a folder beside them."""

from __future__ import annotations

import pickle
import sys
from types import SimpleNamespace

from torchparts_conformance.mutants import load_mutant

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


@mutant(area="combined", kills={"CB-001"})
def %s(part):
    "Broken."
    return broken(part)
"""


def _folder(path):
    (path / "faults").mkdir()
    (path / "faults" / "wheels.py").write_text(SHARED)
    for name in ("front", "back"):
        (path / f"{name}.py").write_text(MUTANT % name)
    return path


def test_files_of_a_folder_share_what_lies_beside_them(tmp_path):
    """One module of it, whichever file came first, and pickle finds what is defined in it."""
    _folder(tmp_path)
    front, back = (load_mutant(f"{tmp_path}/{name}.py::{name}") for name in ("front", "back"))
    first, second = (fault.apply(SimpleNamespace(value=1)) for fault in (front, back))
    assert first.value == second.value == 2
    assert first.__module__ == second.__module__
    assert pickle.loads(pickle.dumps(second)) is second
    assert not any(str(tmp_path) in entry for entry in sys.path)


def test_files_of_two_folders_share_nothing(tmp_path):
    """Files of one name, in folders of one name, are two modules."""
    found = []
    for value in (1, 2):
        (tmp_path / str(value)).mkdir()
        path = _folder(tmp_path / str(value))
        text = (path / "faults" / "wheels.py").read_text()
        (path / "faults" / "wheels.py").write_text(text.replace("+ 1", f"+ {value}"))
        found.append(load_mutant(f"{path}/front.py::front").apply(SimpleNamespace(value=0)).value)
    assert found == [1, 2]
