"""Where a package waits, says that it is done, or keeps others out: found in its source.

A place is a call, a name that is handed on to be called, or a lock that is entered.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

# Who is called by one of these names waits, is waited for, or tells the allocator of a stream.
NAMES = re.compile(
    r"_?wait(_\w+)?|synchronize|query|(monitored_)?barrier|shutdown|as_completed|acquire_lock"
    r"|record_(event|stream)|set_(stream|device_index)|at_home|_On|_on_stream"
)
LOCKS = {"Lock", "RLock", "Condition", "Semaphore", "BoundedSemaphore", "Barrier"}
# A value that is waited for cannot be had without it.
STATEMENTS = {"join", "result"}


class Place(NamedTuple):
    """A place in a file.

    Args:
        start: of its text, in bytes of UTF-8.
        end: where it ends.
        text: as it is written, without its line breaks.
        lock: the name of the lock that is made or entered; empty for other places.
        makes_lock: whether it is made there.
    """

    start: int
    end: int
    text: str
    lock: str = ""
    makes_lock: bool = False


def places(source: str) -> list[Place]:
    """All places of a file, in their order."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))

    def place(node: ast.expr, lock: str) -> Place:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        return Place(start, end, ast.unparse(node), lock, isinstance(node, ast.Call) and bool(lock))

    return sorted({place(node, lock) for node, lock in _found(ast.parse(source))})


def taken(source: str, old: str, new: str) -> list[Place]:
    """Those that go from a file where `old`, which it has once, makes room for `new`."""
    start = len(source[: source.index(old)].encode())
    end = start + len(old.encode())
    left = Counter(place.text for place in places(source.replace(old, new)))
    there = places(source)
    known = Counter(place.text for place in there)
    return [
        place
        for place in there
        if place.start < end and place.end > start
        if left[place.text] < known[place.text]
    ]


def _found(tree: ast.Module) -> Iterator[tuple[ast.expr, str]]:
    """Each, and the name of the lock if it is one."""
    nodes = list(ast.walk(tree))
    called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    locks = dict(_locks(nodes))
    for node in nodes:
        if isinstance(node, ast.Call) and _waits(node):
            yield node, locks.get(node, "")
        elif isinstance(node, ast.Attribute) and id(node) not in called:
            if isinstance(node.ctx, ast.Load) and NAMES.fullmatch(node.attr):
                yield node, ""
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            if _name(node.value.func) in STATEMENTS:
                yield node.value, ""
        elif isinstance(node, (ast.With, ast.AsyncWith)):
            for item in node.items:
                name = _name(item.context_expr)
                if name in locks.values() or name.endswith("lock"):
                    yield item.context_expr, name
                elif name.endswith("stream"):
                    yield item.context_expr, ""


def _waits(call: ast.Call) -> bool:
    name = _name(call.func)
    if name == "record":
        return isinstance(call.func, ast.Attribute)
    return name in LOCKS or bool(NAMES.fullmatch(name))


def _locks(nodes: list[ast.AST]) -> Iterator[tuple[ast.Call, str]]:
    """Where a file makes locks, and the names that they have."""
    for node in nodes:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Call):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if _name(node.value.func) in LOCKS:
                yield node.value, _name(target)


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
