"""Cases can fail: each asserts something about the part, and one that does not is found out.

What counts is read from a case's syntax tree:

Rule 1: a case needs an assertion: `assert`, `assert_close`, `pytest.raises`, `pytest.warns`, or a
call of a helper beside it that has one.
Rule 2: the assertion is about the part: its names are tied to the fixture `part`, `parts` or
`ranks` by the statements of the case. Two names are tied where one statement has both, and a name
in a block is tied to those in the head of the block.
Rule 3: what a helper beside the case finds in the whole process is tied to the part as well.
"""

from __future__ import annotations

import ast
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from torchparts_conformance.requirements._areas import AREAS, folder_of
from torchparts_conformance.requirements._cases import CASES, find_cases

FOLDERS = [folder_of(area) for area in AREAS]
SUBJECTS = frozenset({"part", "parts", "ranks"})
_CHECKS = frozenset({"pytest.raises", "pytest.warns"})
_COMPARISON = "torch.testing.assert_close"
_Function = (ast.FunctionDef, ast.AsyncFunctionDef)


def cases_without_evidence(folder: Path) -> list[str]:
    """Give the cases of one area's folder that could not fail because of the part."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in folder.glob("*.py")}
    asserting = asserting_functions(trees.values())
    helpers = frozenset(functions_of(trees.values()))
    return sorted(
        f"{folder.name}/{path.name}::{node.name}"
        for path, tree in trees.items()
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        if not has_evidence(node, asserting, helpers)
    )


def asserting_functions(trees: Iterable[ast.Module]) -> frozenset[str]:
    """Give the names of module-level functions that assert, by themselves or through others."""
    functions = functions_of(trees)
    found: frozenset[str] = frozenset()
    while True:
        more = frozenset(
            name
            for name, node in functions.items()
            if any(_is_assertion(inner, found) for inner in ast.walk(node))
        )
        if more == found:
            return found
        found = more


def functions_of(trees: Iterable[ast.Module]) -> dict[str, ast.FunctionDef]:
    """Give the module-level functions of some files by name."""
    return {
        node.name: node for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)
    }


def has_evidence(case: ast.FunctionDef, asserting: frozenset[str], helpers: frozenset[str]) -> bool:
    """Say whether a case asserts something that is tied to the part."""
    local = {a.arg for a in ast.walk(case.args) if isinstance(a, ast.arg)} | _stored(case)
    ties = list(_ties(case.body, frozenset(), local))
    tied = _closure(set(SUBJECTS & local), ties)
    is_used = any(_names(statement) & SUBJECTS for statement in case.body)
    return is_used and any(
        _names(node) & (tied | helpers if isinstance(node, ast.Assert) else tied)
        for node in ast.walk(case)
        if _is_assertion(node, asserting)
    )


def _is_assertion(node: ast.AST, asserting: frozenset[str]) -> bool:
    """Say whether a node asserts; a block under `pytest.raises` counts with what is in it."""
    if isinstance(node, (ast.With, ast.AsyncWith)):
        return any(_is_check(item.context_expr) for item in node.items)
    if isinstance(node, ast.Call):
        # A helper that asserts may be called, or handed to `ranks`, which calls it elsewhere.
        called = _plain_names([node.func, *node.args])
        return ast.unparse(node.func) == _COMPARISON or bool(called & asserting)
    return isinstance(node, ast.Assert) and bool(_names(node))


def _is_check(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) in _CHECKS


def _plain_names(nodes: Iterable[ast.expr]) -> set[str]:
    return {
        node.id if isinstance(node, ast.Name) else node.attr
        for node in nodes
        if isinstance(node, (ast.Name, ast.Attribute))
    }


def _names(node: ast.AST) -> set[str]:
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}


def _stored(node: ast.AST) -> set[str]:
    """Give the names a function makes: by assignment, definition, import, loop or block."""
    made = {
        inner.id
        for inner in ast.walk(node)
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store)
    }
    return made | {
        inner.name
        for inner in ast.walk(node)
        if isinstance(inner, (*_Function, ast.ClassDef)) and inner is not node
    }


def _ties(
    body: Iterable[ast.stmt], above: frozenset[str], local: set[str]
) -> Iterator[frozenset[str]]:
    """Give the sets of local names that one statement, with the heads around it, has."""
    for statement in body:
        blocks = [
            block
            for field in ("body", "orelse", "finalbody", "handlers")
            if (block := getattr(statement, field, None))
        ]
        if not blocks or isinstance(statement, (*_Function, ast.ClassDef)):
            name = {statement.name} if isinstance(statement, (*_Function, ast.ClassDef)) else set()
            yield frozenset((_names(statement) | name) & local) | above
            continue
        inside = {id(inner) for block in blocks for part in block for inner in ast.walk(part)}
        head = {
            inner.id
            for inner in ast.walk(statement)
            if isinstance(inner, ast.Name) and id(inner) not in inside
        }
        around = above | frozenset(head & local)
        yield around
        for block in blocks:
            yield from _ties(block, around, local)


def _closure(tied: set[str], ties: Iterable[frozenset[str]]) -> set[str]:
    """Add every set that has a name in common, until none has."""
    rest = list(ties)
    while touching := [names for names in rest if names & tied]:
        tied = tied.union(*touching)
        rest = [names for names in rest if not names <= tied]
    return tied


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_case_asserts_something_about_the_part(folder):
    """No case only runs the part, and none asserts only about something else."""
    assert cases_without_evidence(CASES / folder) == []


class _Removed(ast.NodeTransformer):
    """Takes every assertion out of a file and leaves all else as it is."""

    def visit_Assert(self, node):
        return ast.copy_location(ast.Pass(), node)

    def visit_Expr(self, node):
        if isinstance(node.value, ast.Call) and "assert_close" in ast.unparse(node.value.func):
            return ast.Expr(ast.Tuple(node.value.args, ast.Load()))
        return self.generic_visit(node)

    def visit_With(self, node):
        self.generic_visit(node)
        if any("pytest." in ast.unparse(item.context_expr) for item in node.items):
            return node.body
        return node


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_case_without_its_assertions_is_found_out(folder, tmp_path):
    """Whichever case loses its assertions, and its helpers theirs, it is named."""
    shutil.copytree(CASES / folder, tmp_path / folder)
    for path in (tmp_path / folder).glob("*.py"):
        tree = ast.fix_missing_locations(_Removed().visit(ast.parse(path.read_text())))
        path.write_text(ast.unparse(tree))
    wanted = sorted(case.name for case in find_cases() if case.name.startswith(f"{folder}/"))
    assert cases_without_evidence(tmp_path / folder) == wanted


CASES_TEXT = """
import pytest
import torch

def alive():
    return 3

def same(a, b):
    assert a == b

def on_rank(part, rank, world_size):
    assert part.answer

def test_{name}(part, ranks, device):
    {body}
"""


@pytest.mark.parametrize(
    ("body", "is_evidence"),
    [
        ("assert part.answer == 42", True),
        ("found = part.answer; again = found; assert again", True),
        ("seen = []; part.call(seen.append); assert seen == [1]", True),
        ("same(part.answer, 42)", True),
        ("ranks(2, on_rank)", True),
        ("part.call(); assert alive() == 3", True),
        ("torch.testing.assert_close(part.answer, 42)", True),
        ("with pytest.raises(ValueError): part.call()", True),
        ("with part.on() as found: pass\n    assert found", True),
        ("part.call()", False),
        ("part.call(); assert device", False),
        ("part.call(); assert torch.ones(1) == 1", False),
        ("assert alive() == 3", False),
        ("part.call(); same(1, 1)", False),
        ("with pytest.raises(ValueError): int('x')", False),
    ],
)
def test_evidence_is_an_assertion_tied_to_the_part(tmp_path, body, is_evidence):
    """What the part gave, was given or left behind counts; anything else does not."""
    folder = tmp_path / "ckpt_wrap"
    folder.mkdir()
    (folder / "test_a.py").write_text(CASES_TEXT.format(name="x", body=body))
    assert (cases_without_evidence(folder) == []) == is_evidence
