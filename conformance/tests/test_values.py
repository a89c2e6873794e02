"""What the suite passes around does not change once it was made."""

from __future__ import annotations

import ast
from pathlib import Path

import torchparts_conformance

PACKAGE = Path(torchparts_conformance.__file__).parent
CHANGING = {
    "Ended": "what a process has told so far",
    "CaseResult": "what came out of a case so far",
}


def test_only_what_collects_changes():
    """Every other class of values is frozen; cases have their own."""
    changing = set()
    for path in PACKAGE.rglob("*.py"):
        if "cases" in path.relative_to(PACKAGE).parts:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                words = [ast.unparse(each) for each in node.decorator_list]
                if any(
                    word.startswith("dataclass") and "frozen=True" not in word for word in words
                ):
                    changing.add(node.name)
    assert changing == set(CHANGING)
