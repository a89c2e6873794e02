"""Cases, the requirements they declare, and the tests of PyTorch that these come from.

Decorators are read from syntax trees: no file of cases is imported.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from torchparts_conformance._errors import RegistryError
from torchparts_conformance.requirements._areas import AREAS, folder_of
from torchparts_conformance.requirements._requirement import Requirement, area_of_id, declared

PACKAGE = Path(__file__).parents[1]
CASES = PACKAGE / "cases"
SOURCE_ROOT = "https://github.com/pytorch/pytorch/blob/v2.13.0/"


@dataclass(frozen=True)
class Case:
    """One case function: its place, the first line of its docstring, and its requirements.

    Attributes:
        area: area of its folder.
        name: `folder/file.py::function`.
        text: the first line of its docstring.
        path: of its file.
        ids: of the requirements that it checks.
        declares: those that it declares.
    """

    area: str
    name: str
    text: str
    path: Path
    ids: tuple[str, ...]
    declares: tuple[Requirement, ...]

    def code(self) -> list[str]:
        """Return the lines of its function, without the decorators."""
        tree = ast.parse(text := self.path.read_text(encoding="utf-8"))
        name = self.name.partition("::")[2]
        node = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name)
        return text.splitlines()[node.lineno - 1 : node.end_lineno]


def function_of(case: str) -> str:
    """Return the name of a case without its parameters."""
    return case.partition("[")[0]


def load_registry(root: Path | None = None) -> dict[str, Requirement]:
    """Return every requirement by id, in order of area and id."""
    found: dict[str, Requirement] = {}
    places: dict[str, str] = {}
    cases = find_cases(root)
    for case in cases:
        for requirement in case.declares:
            if (id := requirement.id) in found:
                raise RegistryError(
                    f"{id} is declared twice, by {places[id]} and by {case.name}. Declare it once; "
                    f"further cases of it read @requirement({id!r})."
                )
            found[id], places[id] = requirement, case.name
    for case in cases:
        if unknown := [id for id in case.ids if id not in found]:
            raise RegistryError(
                f"{case.name} checks {unknown[0]}, which no case declares. Give its text, and "
                f"rationale or source, in one @requirement({unknown[0]!r}, ...)."
            )
    return dict(sorted(found.items(), key=lambda item: (AREAS.index(item[1].area), item[0])))


def find_cases(root: Path | None = None) -> list[Case]:
    """Return every case of every area, in order of file and line."""
    return [
        case
        for area in AREAS
        for path in sorted(((root or CASES) / folder_of(area)).glob("test_*.py"))
        for case in _read(path, area, path.stat().st_mtime_ns, path.stat().st_size)
    ]


def cases_by_id(root: Path | None = None) -> dict[str, list[Case]]:
    """Return the cases of each requirement."""
    found: dict[str, list[Case]] = {}
    for case in find_cases(root):
        for id in case.ids:
            found.setdefault(id, []).append(case)
    return found


@functools.cache
def _read(path: Path, area: str, written_ns: int, size_bytes: int) -> tuple[Case, ...]:
    """Read a file, cached by modification time and size."""
    place = f"{path.parent.name}/{path.name}"
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=path.name)
    except SyntaxError as error:
        raise RegistryError(f"{place}:{error.lineno} is not Python: {error.msg}.") from error
    return tuple(
        _case(node, path, place, area)
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    )


def _case(node: ast.FunctionDef, path: Path, place: str, area: str) -> Case:
    marks = list(_marks(node, place, area))
    if not marks:
        raise RegistryError(
            f"{place}:{node.lineno} {node.name} has no @requirement. Every case checks one."
        )
    return Case(
        area,
        f"{place}::{node.name}",
        (ast.get_docstring(node) or "").partition("\n")[0],
        path,
        ids=tuple(id for id, _ in marks),
        declares=tuple(made for _, made in marks if made is not None),
    )


def _marks(
    node: ast.FunctionDef, place: str, area: str
) -> Iterator[tuple[str, Requirement | None]]:
    """Return the marks in decorators, also those inside a parametrization."""
    takes_device = "device" in {argument.arg for argument in node.args.args}
    for inner in (inner for decorator in node.decorator_list for inner in ast.walk(decorator)):
        if isinstance(inner, ast.Call) and ast.unparse(inner.func) == "requirement":
            try:
                yield _mark(inner, area, on_accelerators=takes_device)
            except (ValueError, TypeError) as error:
                raise RegistryError(f"{place}:{inner.lineno} {error}") from error


def _mark(call: ast.Call, area: str, *, on_accelerators: bool) -> tuple[str, Requirement | None]:
    facts: dict[str, Any] = {str(word.arg): _literal(word.value) for word in call.keywords}
    id, *text = [_literal(argument) for argument in call.args] or [None]
    if len(text) > 1:
        raise ValueError("requirement takes one id and its text; stack decorators for several.")
    if (area_of := area_of_id(id)) != area:
        raise ValueError(f"requirement {id} is of {area_of}, but the case is of {area}.")
    if not text and not facts:
        return id, None
    return id, declared(id, *text, on_accelerators=on_accelerators, **facts)


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise ValueError(
            f"requirement: {ast.unparse(node)!r:.60} is not a literal. Write its value; the suite "
            "reads decorators without running the file."
        ) from None


def parse_toml(text: str) -> dict[str, Any]:
    """Parse a TOML document."""
    parser = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    parsed: dict[str, Any] = parser.loads(text)
    return parsed


@functools.cache
def source_tests() -> dict[tuple[str, str], str]:
    """Return the file and class of each test of PyTorch, by area and name."""
    areas = parse_toml((PACKAGE / "source_tests.toml").read_text(encoding="utf-8"))
    return {
        (area, name): f"{entry['path']}::{entry['class']}"
        for area, entry in areas.items()
        for name in entry["tests"]
    }


def trace(root: Path | None = None) -> tuple[list[str], list[str]]:
    """Map each test of PyTorch to its requirements and their cases.

    Returns:
        A line for each test, and a line for each broken link.
    """
    cases, by_source = cases_by_id(root), dict[tuple[str, str], list[str]]()
    for requirement in load_registry(root).values():
        if requirement.source and not requirement.is_documented:
            key = (requirement.area, requirement.source)
            by_source.setdefault(key, []).append(requirement.id)
    lines, problems = [], []
    for (area, name), place in source_tests().items():
        ids = by_source.pop((area, name), [])
        checked_by = dict.fromkeys(case.name for id in ids for case in cases[id])
        lines.append(f"{Path(place).name}::{name} -> {', '.join(ids)} -> {', '.join(checked_by)}")
        if not ids:
            problems.append(f"{name} of {area} has no requirement")
    problems += [
        f"{', '.join(ids)} names {name}, which is not a test of PyTorch for {area}"
        for (area, name), ids in by_source.items()
    ]
    return lines, problems
