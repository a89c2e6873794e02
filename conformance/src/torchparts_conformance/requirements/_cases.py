"""The cases and the requirements they declare, read from syntax trees without importing them."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchparts_conformance._errors import RegistryError
from torchparts_conformance._package import PACKAGE
from torchparts_conformance.requirements._areas import AREAS, folder_of
from torchparts_conformance.requirements._requirement import Requirement, area_of_id, declared

CASES = PACKAGE / "cases"


@dataclass(frozen=True)
class Mark:
    """One `@requirement(...)`: its id, its line, and the requirement if it declares one."""

    id: str
    line: int
    requirement: Requirement | None


@dataclass(frozen=True)
class Case:
    """One case function: its place, the first line of its docstring, and its marks."""

    area: str
    name: str
    line: int
    text: str
    path: Path
    marks: tuple[Mark, ...]

    @property
    def ids(self) -> tuple[str, ...]:
        """The requirements that it checks."""
        return tuple(mark.id for mark in self.marks)


def function_of(case: str) -> str:
    """Return the name of a case without its parameters."""
    return case.partition("[")[0]


def load_registry(root: Path | None = None) -> dict[str, Requirement]:
    """Return every requirement by id, in order of area and id.

    Raises:
        RegistryError: a decorator is wrong, or an id is declared twice or not at all.
    """
    cases = find_cases(root)
    found: dict[str, Requirement] = {}
    places: dict[str, str] = {}
    for case, mark in _marks(cases):
        if mark.requirement is None:
            continue
        if mark.id in found:
            raise RegistryError(
                f"{mark.id} is declared twice, by {places[mark.id]} and by {case.name}. Declare it "
                f"once; further cases of it read @requirement({mark.id!r})."
            )
        found[mark.id], places[mark.id] = mark.requirement, case.name
    for case, mark in _marks(cases):
        if mark.id not in found:
            raise RegistryError(
                f"{case.name} checks {mark.id}, which no case declares. Give level, text, since, "
                f"profile and rationale or source in one @requirement({mark.id!r}, ...)."
            )
    return dict(sorted(found.items(), key=lambda item: (AREAS.index(item[1].area), item[0])))


def _marks(cases: Iterable[Case]) -> Iterator[tuple[Case, Mark]]:
    return ((case, mark) for case in cases for mark in case.marks)


def find_cases(root: Path | None = None) -> list[Case]:
    """Return every case of every area, in order of file and line.

    Raises:
        RegistryError: a case names no requirement, or a decorator is wrong.
    """
    return [
        case
        for area in AREAS
        for path in sorted(((root or CASES) / folder_of(area)).glob("test_*.py"))
        for case in _cases_in(path, area)
    ]


def cases_by_id(root: Path | None = None) -> dict[str, list[Case]]:
    """Return the cases of each requirement."""
    found: dict[str, list[Case]] = {}
    for case in find_cases(root):
        for id in case.ids:
            found.setdefault(id, []).append(case)
    return found


def _cases_in(path: Path, area: str) -> tuple[Case, ...]:
    here = path.stat()
    return _read(path, area, here.st_mtime_ns, here.st_size)


@functools.cache
def _read(path: Path, area: str, written_ns: int, size_bytes: int) -> tuple[Case, ...]:
    """Read a file; time and size are in the key, so that a changed file is read again."""
    place = f"{path.parent.name}/{path.name}"
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=path.name)
    except SyntaxError as error:
        raise RegistryError(f"{place}:{error.lineno} is not Python: {error.msg}.") from error
    found = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            marks = tuple(_marks_of(node, place, area))
            if not marks:
                raise RegistryError(
                    f"{place}:{node.lineno} {node.name} has no @requirement. Every case checks one."
                )
            text = (ast.get_docstring(node) or "").partition("\n")[0]
            found.append(Case(area, f"{place}::{node.name}", node.lineno, text, path, marks))
    return tuple(found)


def _marks_of(node: ast.FunctionDef, place: str, area: str) -> Iterator[Mark]:
    """Return the marks in decorators, those inside a parametrization included."""
    for inner in (inner for decorator in node.decorator_list for inner in ast.walk(decorator)):
        if isinstance(inner, ast.Call) and ast.unparse(inner.func) == "requirement":
            try:
                yield _mark(inner, area)
            except (ValueError, TypeError) as error:
                raise RegistryError(f"{place}:{inner.lineno} {error}") from error


def _mark(call: ast.Call, area: str) -> Mark:
    facts: dict[str, Any] = {str(word.arg): _literal(word.value) for word in call.keywords}
    ids = [_literal(argument) for argument in call.args]
    if len(ids) != 1:
        raise ValueError("requirement takes one id; stack decorators for several.")
    if (area_of := area_of_id(ids[0])) != area:
        raise ValueError(f"requirement {ids[0]} is of {area_of}, but the case is of {area}.")
    return Mark(ids[0], call.lineno, declared(ids[0], **facts) if facts else None)


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise ValueError(
            f"requirement: {ast.unparse(node)!r:.60} is no literal. Write its value; the suite "
            "reads decorators without running the file."
        ) from None
