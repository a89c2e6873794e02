"""The text that a case's outcome depends on, and its fingerprint.

Rule 1: a case is its function, everything of its file that this names, and what that names in turn,
with the imports that bring names; a file beside it is followed through its imports.
Rule 2: text is text: a comment in it counts, and line ends and the order of definitions do not.
"""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class _Statement:
    """A statement at the top of a file: its text, the names it uses, and what it takes elsewhere.

    `elsewhere` goes from a name to the file beside that has it, and its name there.
    """

    path: Path
    text: str
    uses: frozenset[str]
    elsewhere: Mapping[str, tuple[Path, str]]


def fingerprint(path: Path, function: str) -> str:
    """Hash the text that a case depends on.

    Args:
        path: of its file.
        function: its name there.
    Raises:
        KeyError: the file has no such function.
    """
    if function not in _statements_of(path):
        raise KeyError(function)
    texts = sorted({statement.text for statement in _reached(path, function)})
    return hashlib.sha256("\n\n".join(texts).encode()).hexdigest()


def _reached(path: Path, name: str) -> Iterator[_Statement]:
    waiting, seen = [(path, name)], set()
    while waiting:
        place = waiting.pop()
        if place in seen:
            continue
        seen.add(place)
        here = _statements_of(place[0])
        for statement in (*here.get(place[1], ()), *here.get("", ())):
            if place[1] in statement.elsewhere:
                waiting.append(statement.elsewhere[place[1]])
            else:
                waiting += [(place[0], used) for used in sorted(statement.uses & here.keys())]
                yield statement


def _statements_of(path: Path) -> Mapping[str, tuple[_Statement, ...]]:
    here = path.stat()
    return _read(path, here.st_mtime_ns, here.st_size)


@functools.cache
def _read(path: Path, written_ns: int, size_bytes: int) -> Mapping[str, tuple[_Statement, ...]]:
    """Give the statements of a file by each name they make; under "" those that make none."""
    source = path.read_bytes().replace(b"\r\n", b"\n").decode()
    lines = source.split("\n")
    found: dict[str, tuple[_Statement, ...]] = {}
    for node in ast.parse(source, filename=path.name).body:
        if _is_text_alone(node):
            continue
        made = _Statement(path, _text(node, lines), _uses(node), _elsewhere(node, path))
        for name in _makes(node):
            found[name] = (*found.get(name, ()), made)
    return found


def _text(node: ast.stmt, lines: list[str]) -> str:
    """Give a statement as it is written, with its decorators."""
    first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
    return "\n".join(lines[first - 1 : node.end_lineno])


def _is_text_alone(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _makes(node: ast.stmt) -> Iterable[str]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return (node.name,)
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return [alias.asname or alias.name.partition(".")[0] for alias in node.names]
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        inner = [part for target in targets for part in ast.walk(target)]
        return [part.id for part in inner if isinstance(part, ast.Name)] or ("",)
    return ("",)


def _uses(node: ast.stmt) -> frozenset[str]:
    """Give the names a statement reads, those of fixtures among its arguments too."""
    inner = list(ast.walk(node))
    names = {part.id for part in inner if isinstance(part, ast.Name)}
    return frozenset(names | {part.arg for part in inner if isinstance(part, ast.arg)})


def _elsewhere(node: ast.stmt, path: Path) -> Mapping[str, tuple[Path, str]]:
    """Give what an import takes from a file beside, or below the same folder of cases."""
    if not isinstance(node, ast.ImportFrom) or not node.module:
        return {}
    *_, folder, name = ("", *node.module.split("."))
    candidates = (path.parent.parent / folder / f"{name}.py", path.with_name(f"{name}.py"))
    beside = next((p for p in candidates if p.is_file() and p != path), None)
    if beside is None:
        return {}
    return {alias.asname or alias.name: (beside, alias.name) for alias in node.names}
