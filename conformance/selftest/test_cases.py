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
