"""What can be known about the cases without running them: read from their syntax trees."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torchparts_conformance._package import PACKAGE
from torchparts_conformance.requirements._registry import AREAS, folder_of

CASES = PACKAGE / "cases"


@dataclass(frozen=True)
class Case:
    """One case function: where it is, and what it checks."""

    area: str
    name: str
    line: int
    ids: tuple[str, ...]
    text: str
    path: Path


def find_cases(root: Path | None = None) -> list[Case]:
    """Give every case of every area, in order of file and line."""
    return [
        case
        for area in AREAS
        for path in sorted(((root or CASES) / folder_of(area)).glob("test_*.py"))
        for case in _cases_in(path, area)
    ]


def cases_by_id(root: Path | None = None) -> dict[str, list[Case]]:
    """Give the cases of each requirement that has any."""
    found: dict[str, list[Case]] = {}
    for case in find_cases(root):
        for id in case.ids:
            found.setdefault(id, []).append(case)
    return found


def _cases_in(path: Path, area: str) -> Iterator[Case]:
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=path.name)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield Case(
                area=area,
                name=f"{path.parent.name}/{path.name}::{node.name}",
                line=node.lineno,
                ids=tuple(_ids(node)),
                text=(ast.get_docstring(node) or "").partition("\n")[0],
                path=path,
            )


def _ids(node: ast.FunctionDef) -> Iterator[str]:
    """Give the ids in `@requirement(...)`, and in marks inside a parametrisation."""
    for inner in (inner for decorator in node.decorator_list for inner in ast.walk(decorator)):
        if isinstance(inner, ast.Call) and ast.unparse(inner.func) == "requirement":
            for argument in inner.args:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield argument.value
