"""Whether what lies behind a value in the graph is what lay there when it was written down.

A plan keeps a value only where it could be made again, which the graph behind the value decides
(Rule 5 of `_edges`). So a forward that follows a plan looks there, too.

Rule 1. What is looked at goes as far as a replay would: to leaves, to what was made before the
        region, and to nodes that saved all that their rule reads.
Rule 2. Each node is looked at once in a forward.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from ...._torch_compat import node_number
from .._replay import LEAF_NODE, Node
from .._replay_entries import ReplayEntry, ReplayTable

_NOTHING, _LEAF, _BEFORE = -1, -2, -3
"""In place of a node's number: where no edge leads, for a leaf, for what is the caller's."""


@dataclass(frozen=True, slots=True)
class Behind:
    """A node as it was.

    Attributes:
        kind: of the node.
        ready: its entry, where it saved all that its rule reads; None where it did not.
        edges: where its edges lead then, by number, and to which output.
    """

    kind: type
    ready: ReplayEntry | None
    edges: tuple[tuple[int, int], ...]


def number_of(node: Node, first: int, makers: Collection[Node]) -> int:
    """The number of a node, counted from the first of its region; below 0 for all others.

    Args:
        node: what an edge leads to.
        first: number of the region's first.
        makers: what made the region's inputs.
    """
    if node is None:
        return _NOTHING
    if type(node).__name__ == LEAF_NODE:
        return _LEAF
    number: int = node_number(node) - first
    return number if number >= 0 and node not in makers else _BEFORE


def note_behind(
    found: dict[int, Behind],
    node: Node,
    first: int,
    makers: Collection[Node],
    entries: ReplayTable,
) -> None:
    """Write down a node, and all that lies behind it, by number (Rule 1).

    Args:
        found: what is written down already.
        node: that made a value.
        first: number of the region's first.
        makers: what made the region's inputs.
        entries: what nodes are replayed.
    """
    left = [node]
    while left:
        node = left.pop()
        number = number_of(node, first, makers)
        if number < 0 or number in found:
            continue
        entry = entries[type(node)]
        is_ready = type(entry) is ReplayEntry and entry.is_ready(node)
        edges = () if is_ready else node.next_functions
        numbers = tuple((number_of(maker, first, makers), output) for maker, output in edges)
        found[number] = Behind(type(node), entry if is_ready else None, numbers)
        left.extend(maker for maker, _ in edges)


class Looked:
    """What one forward looked at (Rule 2).

    Args:
        known: what was written down, by number.
        first: number of the region's first.
    """

    __slots__ = ("_first", "_known", "_seen")

    def __init__(self, known: dict[int, Behind], first: int) -> None:
        self._known, self._first = known, first
        self._seen: dict[int, Node] = {}

    def agrees(self, node: Node, number: int, makers: Collection[Node]) -> bool:
        """Whether a node with this number is as it was, with all behind it.

        Args:
            node: that made a value.
            number: counted from the first of the region.
            makers: what made the region's inputs.
        """
        first, seen = self._first, self._seen
        left: list[tuple[Node, int]] = [(node, number)]
        while left:
            node, number = left.pop()
            before = seen.get(number)
            if before is not None:
                if before is node:
                    continue
                return False
            known = self._known.get(number)
            kind: Any = type(node)
            if known is None or kind is not known.kind:
                return False
            seen[number] = node
            if known.ready is not None:
                if known.ready.is_ready(node):
                    continue
                return False
            edges = node.next_functions
            if len(edges) != len(known.edges):
                return False
            for (maker, output), (at, wanted) in zip(edges, known.edges, strict=True):
                if output != wanted or number_of(maker, first, makers) != at:
                    return False
                if at >= 0:
                    left.append((maker, at))
        return True

    def forget(self) -> None:
        """Let go of the nodes."""
        self._seen.clear()
