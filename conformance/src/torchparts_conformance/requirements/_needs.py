"""Names and options of a part that a case uses, read from the syntax tree of its file.

- A case needs the names it reads from `part` or `parts`, and those that its helpers read.
- A function that calls `hasattr(part, ...)` has no certain needs.
- An option in a block that expects an error may be wrong on purpose.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PART = "part"
_Places = dict[str, tuple[Path, ast.AST]]


@dataclass(frozen=True)
class Needs:
    """Names of a part, and options of its functions.

    Attributes:
        names: as written after `part.`.
        options: pairs of a name and a keyword in a call of it.
        attempts: such pairs where an error is expected or caught.
    """

    names: frozenset[str] = frozenset()
    options: frozenset[tuple[str, str]] = frozenset()
    attempts: frozenset[tuple[str, str]] = frozenset()


def needs_of(path: Path, function: str) -> Needs:
    """Return the needs of one case, by its file and its name there."""
    found = [_said_by(node) for node in _reached(path, function) if not _asks(node)]
    return Needs(
        frozenset().union(*(needs.names for needs in found)),
        frozenset().union(*(needs.options for needs in found)),
        frozenset().union(*(needs.attempts for needs in found)),
    )


@functools.cache
def _said_by(node: ast.AST) -> Needs:
    """Return the needs of a function or class, without those of its helpers."""
    names: set[str] = set()
    options: set[tuple[str, str]] = set()
    attempts: set[tuple[str, str]] = set()
    awaited = set(_awaited(node))
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Load):
            names.add(_called(inner).partition(".")[0])
        elif isinstance(inner, ast.Call) and (name := _called(inner.func)):
            given = {(name, keyword.arg) for keyword in inner.keywords if keyword.arg}
            (attempts if inner in awaited else options).update(given)
    return Needs(frozenset(names - {""}), frozenset(options), frozenset(attempts))


def _called(node: ast.AST) -> str:
    """Return all names after `part.`, since the callee may be a method of a class."""
    words: list[str] = []
    while isinstance(node, ast.Attribute):
        words.append(node.attr)
        node = node.value
    is_part = isinstance(node, ast.Name) and node.id == _PART
    return ".".join(reversed(words)) if is_part else ""


def _awaited(node: ast.AST) -> Iterator[ast.AST]:
    """Return the nodes of blocks that expect or catch an error."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Try) or (isinstance(inner, ast.With) and _awaits(inner)):
            for statement in inner.body:
                yield from ast.walk(statement)


def _awaits(block: ast.With) -> bool:
    return any("raises" in ast.dump(item.context_expr) for item in block.items)


def _reached(path: Path, function: str) -> Iterator[ast.AST]:
    """Return a case's function and its helpers, in its file and in files of the same folder."""
    waiting, seen = [(path, function)], set()
    while waiting:
        here, name = waiting.pop()
        place = _definitions(here).get(name)
        if place is not None and place not in seen:
            seen.add(place)
            waiting += [(place[0], named) for named in _named(place[1])]
            yield place[1]


@functools.cache
def _named(node: ast.AST) -> tuple[str, ...]:
    return tuple(sorted({inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}))


@functools.cache
def _asks(node: ast.AST) -> bool:
    return any(
        isinstance(inner, ast.Call)
        and isinstance(inner.func, ast.Name)
        and inner.func.id == "hasattr"
        and isinstance(inner.args[0], ast.Name)
        and inner.args[0].id == _PART
        for inner in ast.walk(node)
    )


def _definitions(path: Path) -> _Places:
    """Return the top-level definitions of a file, and its imports from the same folder."""
    here = path.stat()
    return _defined(path, here.st_mtime_ns, here.st_size)


@functools.cache
def _defined(path: Path, written_ns: int, size_bytes: int) -> _Places:
    """Read a file, cached by modification time and size."""
    found: _Places = {}
    for node in ast.parse(path.read_text(encoding="utf-8"), filename=path.name).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found[node.name] = path, node
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {name.id: (path, node) for name in targets if isinstance(name, ast.Name)}
        elif isinstance(node, ast.ImportFrom) and node.module:
            beside = path.with_name(f"{node.module.rpartition('.')[2]}.py")
            if beside.exists() and beside != path:
                theirs = _definitions(beside)
                names = [alias for alias in node.names if alias.name in theirs]
                found |= {alias.asname or alias.name: theirs[alias.name] for alias in names}
    return found
