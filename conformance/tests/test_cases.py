"""What is known of the cases without running them, and what holds of all of them."""

from __future__ import annotations

import ast

from torchparts_conformance.requirements import _registry
from torchparts_conformance.requirements._cases import cases_by_id, find_cases


def test_every_requirement_has_a_case_and_every_case_a_requirement():
    """Nothing is required without being checked, and nothing is checked without being required."""
    registry, cases = _registry.load_registry(), cases_by_id()
    assert sorted(set(registry) - set(cases)) == []
    assert sorted(set(cases) - set(registry)) == []


def test_every_case_stays_in_its_area_and_says_what_it_claims():
    """A case checks requirements of its own folder, and has a sentence that says so."""
    registry = _registry.load_registry()
    strays = [c.name for c in find_cases() for id in c.ids if registry[id].area != c.area]
    silent = [case.name for case in find_cases() if not case.text]
    assert strays == []
    assert silent == []


def test_cases_import_only_what_everybody_has(package):
    """Cases use torch, pytest, the standard library and the suite; never an implementation."""
    ours = {"ckpt_wrap", "mod_tracker", "flat_param", "sac_policies"}
    imported = {
        (path.name, name.partition(".")[0])
        for path in package.glob("cases/*/*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in _modules(node)
    }
    assert [found for found in imported if found[1] in ours] == []


def _modules(node):
    return [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]


FILE = """
import pytest
from torchparts_conformance import requirement

def requirement_of(id): ...

@requirement("CW-002", "CW-001")
def test_two(part):
    \"\"\"It holds.

    And more.
    \"\"\"

@pytest.mark.parametrize("x", [pytest.param(1, marks=requirement("CW-003"))])
@pytest.mark.parametrize("y", ["CW-004"])
def test_marked_inside(part, x, y):
    pass

@requirement("CW-005")
def helper(part):
    def test_inner(): ...
"""


def test_cases_are_read_from_their_files_without_importing_them(tmp_path):
    """Functions at the top that pytest would take, with the ids that are in their marks."""
    (tmp_path / "ckpt_wrap").mkdir()
    path = tmp_path / "ckpt_wrap" / "test_a.py"
    path.write_text("raise SystemExit\n" + FILE)
    (tmp_path / "ckpt_wrap" / "_beside.py").write_text(FILE)
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / "test_b.py").write_text(FILE)
    two, inside = find_cases(tmp_path)
    assert (two.area, two.name, two.path) == ("ckpt-wrap", "ckpt_wrap/test_a.py::test_two", path)
    assert (two.ids, two.text) == (("CW-002", "CW-001"), "It holds.")
    assert path.read_text().splitlines()[two.line - 1].startswith("def test_two(")
    assert (inside.ids, inside.text) == (("CW-003",), "")


def test_cases_are_found_by_each_of_their_ids(tmp_path):
    """And in order of file and line."""
    (tmp_path / "ckpt_wrap").mkdir()
    for name in ("test_b.py", "test_a.py"):
        (tmp_path / "ckpt_wrap" / name).write_text(FILE)
    found = cases_by_id(tmp_path)
    assert set(found) == {"CW-001", "CW-002", "CW-003"}
    assert [case.path.name for case in found["CW-001"]] == ["test_a.py", "test_b.py"]
