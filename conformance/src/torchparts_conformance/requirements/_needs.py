"""What of a part a case cannot do without, read from the syntax tree of its file.

Rule 1: a case needs what it names of `part` or `parts`, and what the functions it names do.
Rule 2: a function that asks with `hasattr` whether the part has something needs nothing for sure.
Rule 3: an option that is given where an error is awaited may be a wrong one on purpose.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_ASKERS = ("part", "parts")
_Places = dict[str, tuple[Path, ast.AST]]


@dataclass(frozen=True)
class Needs:
    """Names of a part as they are written after `part.`, and options of functions of it.

    `options` are pairs of a name and a keyword that it is called with; `attempts` are those where
    an error is awaited or caught.
    """

    names: frozenset[str] = frozenset()
    options: frozenset[tuple[str, str]] = frozenset()
    attempts: frozenset[tuple[str, str]] = frozenset()


def needs_of(path: Path, function: str, *, combined: bool = False) -> Needs:
    """Give what one case needs.

    Args:
        path: its file.
        function: its name there.
        combined: `part` and `parts` hold all parts, so that a name is `ckpt_wrap.offload_wrapper`.
    """
    names: set[str] = set()
    options: set[tuple[str, str]] = set()
    attempts: set[tuple[str, str]] = set()
    for node in _reached(path, function):
        awaited = set(_awaited(node))
        for inner in ast.walk(node):
            if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Load):
                names.add(_name(inner, combined))
            elif isinstance(inner, ast.Call) and (name := _name(inner.func, combined)):
                given = {(name, keyword.arg) for keyword in inner.keywords if keyword.arg}
                (attempts if inner in awaited else options).update(given)
    return Needs(frozenset(names - {""}), frozenset(options), frozenset(attempts))


def _name(node: ast.AST, combined: bool) -> str:
    """Give the first words after `part.`, or nothing where it is not about a part."""
    words: list[str] = []
    while isinstance(node, ast.Attribute):
        words.append(node.attr)
        node = node.value
    roots = _ASKERS if combined else _ASKERS[:1]
    is_part = isinstance(node, ast.Name) and node.id in roots
    return ".".join(words[::-1][: 2 if combined else 1]) if is_part else ""


def _awaited(node: ast.AST) -> Iterator[ast.AST]:
    """Give the nodes of blocks that await an error or catch one."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Try) or (isinstance(inner, ast.With) and _awaits(inner)):
            for statement in inner.body:
                yield from ast.walk(statement)


def _awaits(block: ast.With) -> bool:
    return any("raises" in ast.dump(item.context_expr) for item in block.items)


def _reached(path: Path, function: str) -> Iterator[ast.AST]:
    """Give a case's function, and what else of its file and of files beside it that it names."""
    waiting, seen = [(path, function)], set()
    while waiting:
        here, name = waiting.pop()
        place = _definitions(here).get(name)
        if place is None or place in seen:
            continue
        seen.add(place)
        found, node = place
        named = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
        waiting += [(found, name) for name in sorted(named)]
        if not _asks(node):
            yield node


def _asks(node: ast.AST) -> bool:
    return any(
        isinstance(inner, ast.Call)
        and isinstance(inner.func, ast.Name)
        and inner.func.id == "hasattr"
        and isinstance(inner.args[0], ast.Name)
        and inner.args[0].id in _ASKERS
        for inner in ast.walk(node)
    )


_parse = functools.cache(ast.parse)


def _definitions(path: Path) -> _Places:
    """Give what a file defines at its top, and what it has from files of the same folder."""
    found: _Places = {}
    for node in _parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found[node.name] = path, node
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {name.id: (path, node) for name in targets if isinstance(name, ast.Name)}
        elif isinstance(node, ast.ImportFrom) and node.module:
            beside = path.with_name(f"{node.module.rpartition('.')[2]}.py")
            if beside.exists() and beside != path:
                theirs = _definitions(beside)
                found |= {
                    a.asname or a.name: theirs[a.name] for a in node.names if a.name in theirs
                }
    return found
