"""What replays of one forward read at edges, written down for those after it (`_followed`).

To find an operand takes a walk through the graph, with questions at each node. A forward that
saves the same mostly has the same graph: a look at each edge tells, and what is found there is
held for the replay, which walks no more.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from ...._tensors import tensors_in
from ...._torch_compat import node_number
from .._edges import is_plain
from .._own_rules import known_rule
from .._replay import LEAF_NODE, Node, output_facts
from .._replay_entries import ReplayEntry, ReplayTable
from .._shared_values import SharedValue, Source
from .._sources import Edges, Whole
from .._views import TAKES, Take


@dataclass(frozen=True, slots=True)
class Saved:
    """An operand that the node saved.

    Attributes:
        attribute: of the node.
        unless: the edge that must be there for that; None where it always is saved.
    """

    attribute: str
    unless: int | None


@dataclass(frozen=True, slots=True)
class Kept:
    """A value that the region keeps.

    Attributes:
        at: counts those that replays read.
        is_whole: whether only a view of it is kept, which has all of its storage.
    """

    at: int
    is_whole: bool = False


@dataclass(frozen=True, slots=True)
class Given:
    """A value that the region was given; `at` counts the tensors among its arguments."""

    at: int


@dataclass(frozen=True, slots=True)
class Returned:
    """A value that the policy keeps, and that only a mode saw, as what a call returned."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What a mode saw a call be given; `at` is the operand's position."""

    at: int


class Value:
    """A value that is replayed.

    Attributes:
        at: which of the region's values it is.
        entry: of the node that made it.
        number: of that, counted from the first of the region.
        is_own: whether the node saved something under the region's hooks.
        dtype: of the value; None where the node does not tell.
        device: that it is on; None like it.
        edges: how many the node has.
        operands: what its replay reads; None where the node saved all.
        readers: how many it has; 0 until the forward has ended.
    """

    __slots__ = (
        *("at", "device", "dtype", "edges", "entry"),
        *("is_own", "number", "operands", "readers"),
    )

    def __init__(
        self,
        at: int,
        entry: ReplayEntry,
        number: int,
        is_own: bool,
        dtype: torch.dtype | None,
        device: torch.device | None,
        edges: int = 0,
        operands: tuple[Saved | AtEdge, ...] | None = None,
    ) -> None:
        self.at, self.entry, self.number, self.is_own = at, entry, number, is_own
        self.dtype, self.device = dtype, device
        self.edges, self.operands, self.readers = edges, operands, 0


@dataclass(frozen=True, slots=True)
class AtEdge:
    """An operand that lies at an edge.

    Attributes:
        edge: which of the node's.
        unless: the edge that must not be there: else the node saved the operand.
        views: kinds of the nodes on the way, and what takes each view again.
        end: what is behind them; None for a leaf.
    """

    edge: int
    unless: int | None
    views: tuple[tuple[Any, Take], ...]
    end: Value | Kept | Given | Returned | Seen | None


class NotFollowedError(Exception):
    """A replay reads what no later forward is to look for."""


class NotedValues:
    """What replays of one forward read, as it is written down.

    Attributes:
        sources: identities of what is held of values that replays read, each with its place.
    """

    def __init__(self, edges: Edges, entries: ReplayTable, first: int, given: Any) -> None:
        self._edges, self._entries, self._first = edges, entries, first
        self._given = tuple(tensors_in(given))
        self._values: dict[SharedValue, Value] = {}
        self.sources: dict[int, int] = {}
        self._saw: set[int] = set()

    @property
    def noted(self) -> Iterable[Value]:
        """What is replayed."""
        return self._values.values()

    def saw(self, held: Any) -> None:
        """Note what is held of a tensor that is written down, as long as that lives."""
        self._saw.add(id(held))

    def value(self, node: Node, cell: SharedValue) -> Value:
        """Write a value down, with all that its replay reads.

        Args:
            node: that made it.
            cell: what its readers share.

        Raises:
            NotFollowedError: that is not to be followed.
        """
        found = self._values.get(cell)
        if found is not None:
            return found
        facts = output_facts(node)
        entry, number = self._entries[type(node)], node_number(node)
        if type(entry) is not ReplayEntry:
            raise NotFollowedError
        operands = self._operands(node, cell) if cell.through else None
        value = self._values[cell] = Value(
            at=len(self._values),
            entry=entry,
            number=number - self._first,
            is_own=number + 1 in self._edges.own,
            dtype=getattr(facts, "dtype", None),
            device=getattr(facts, "device", None),
            edges=len(node.next_functions),
            operands=operands,
        )
        return value

    def _operands(self, node: Node, cell: SharedValue) -> tuple[Saved | AtEdge, ...]:
        rule, edges = known_rule(type(node)), node.next_functions
        found: list[Saved | AtEdge] = []
        for at, each in enumerate(rule.operands_of(node)):
            unless = each.unless if each.saved else None
            if each.is_saved(edges):
                found.append(Saved(each.saved, unless))
                continue
            maker, output = edges[each.edge] if each.edge < len(edges) else (None, 0)
            if maker is None:
                if not self._edges.forgets:
                    raise NotFollowedError
                found.append(AtEdge(each.edge, unless, (), Seen(at)))
                continue
            views: list[tuple[type, Take]] = []
            left, source = (cell.held or {}).get(at, (None, None))
            while maker is not None and left != 0 and type(maker).__name__ in TAKES:
                views.append((type(maker), TAKES[type(maker).__name__]))
                maker, output = maker.next_functions[0]
                left = None if left is None else left - 1
            end: Value | Kept | Given | Returned | None = None
            if source is not None:
                end = self._source(source(), maker, output)
            elif type(maker).__name__ != LEAF_NODE:
                end = self.value(maker, maker.metadata[self._edges.key])
            found.append(AtEdge(each.edge, unless, tuple(views), end))
        return tuple(found)

    def _source(self, source: Source | None, node: Node, output: int) -> Kept | Given | Returned:
        if source is None:
            raise NotFollowedError
        is_whole = type(source.held) is Whole
        held = source.held.held if is_whole else source.held
        if id(held) in self._saw:
            return Kept(self.sources.setdefault(id(held), len(self.sources)), is_whole)
        for at, tensor in enumerate(self._given):
            if tensor.grad_fn is node and tensor.output_nr == output and is_plain(tensor):
                return Given(at)
        if output == 0 and self._edges.calls.has_result(node_number(node)):
            return Returned()
        raise NotFollowedError

    def count(self) -> None:
        """Note how many readers each value has, when the forward has ended."""
        for cell, value in self._values.items():
            value.readers = cell.readers

    def forget(self) -> None:
        """Let go of all that is the forward's."""
        self._values.clear()
        self._saw.clear()
        self._given = ()
