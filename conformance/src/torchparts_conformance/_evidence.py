"""Pure: whether a case can fail because of the part it is given, read from its syntax tree.

Rule 1: a case needs an assertion: `assert`, `assert_close`, `pytest.raises`, `pytest.warns`, or a
call of a helper beside it that has one.
Rule 2: the assertion is about the part: its names are tied to the fixture `part`, `parts` or
`ranks` by the statements of the case. Two names are tied where one statement has both, and a name
in a block is tied to those in the head of the block.
Rule 3: what a helper beside the case finds in the whole process is tied to the part as well.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

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
