"""What replays read at edges: written down of one forward, looked at and taken in those after it.

To find an operand takes a walk through the graph, with questions at each node. A forward that
saves the same mostly has the same graph: a look at each edge tells, and what is found there is
held for the replay, which walks no more.

Rule 1. Whatever is looked at is the node itself: its kind, its number, its edges, what it made.
        Where one is another than was written down, nothing is taken.
Rule 2. What is taken points where the graph does, to what was made before (Rules 1 and 4 of
        `_recipes`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from ...._tensors import tensors_in
from ...._torch_compat import node_number
from .._edges import is_plain, makers_of
from .._own_rules import known_rule
from .._recipes import Reader, keep
from .._replay import LEAF_NODE, Node, is_unhooked, output_facts
from .._replay_entries import ReplayEntry, ReplayTable
from .._shared_values import SharedValue, Source
from .._sources import Edges
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
    """A value that the region keeps; `at` counts those that replays read."""

    at: int


@dataclass(frozen=True, slots=True)
class Given:
    """A value that the region was given; `at` counts the tensors among its arguments."""

    at: int


@dataclass(eq=False, slots=True)
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
        readers: how many it has, known when the forward has ended.
    """

    at: int
    entry: ReplayEntry
    number: int
    is_own: bool
    dtype: torch.dtype | None
    device: torch.device | None
    edges: int = 0
    operands: tuple[Saved | AtEdge, ...] | None = None
    readers: int = 0


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
    end: Value | Kept | Given | None


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
            views: list[tuple[type, Take]] = []
            left, source = (cell.held or {}).get(at, (None, None))
            while maker is not None and left != 0 and type(maker).__name__ in TAKES:
                views.append((type(maker), TAKES[type(maker).__name__]))
                maker, output = maker.next_functions[0]
                left = None if left is None else left - 1
            end: Value | Kept | Given | None = None
            if maker is None:
                raise NotFollowedError
            if source is not None:
                end = self._source(source(), maker, output)
            elif type(maker).__name__ != LEAF_NODE:
                end = self.value(maker, maker.metadata[self._edges.key])
            found.append(AtEdge(each.edge, unless, tuple(views), end))
        return tuple(found)

    def _source(self, source: Source | None, node: Node, output: int) -> Kept | Given:
        if source is None:
            raise NotFollowedError
        if id(source.held) in self._saw:
            return Kept(self.sources.setdefault(id(source.held), len(self.sources)))
        for at, tensor in enumerate(self._given):
            if tensor.grad_fn is node and tensor.output_nr == output and is_plain(tensor):
                return Given(at)
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


class FollowedValues:
    """The same in a forward that follows: what is there is looked at, and taken.

    Attributes:
        found: by value: its node, what its readers share, and how many elements it has where that
            is looked at.
        makers: nodes that made what the region was given; None until they are listed.
        shortened: by number, cells of what nodes saved and less is kept of, which replays read.
    """

    __slots__ = (
        *("_entries", "_first", "_given", "_read", "_sources"),
        *("found", "makers", "shortened"),
    )

    def __init__(self, entries: ReplayTable, read: Reader, first: int, given: Any) -> None:
        self._entries, self._read, self._first, self._given = entries, read, first, given
        self._sources: dict[int, tuple[Node, int, Source]] = {}
        self.found: dict[int, tuple[Node, SharedValue, int]] = {}
        self.makers: frozenset[Node] | None = None
        self.shortened: dict[int, list[SharedValue]] = {}

    def list_makers(self) -> frozenset[Node]:
        """List what made the tensors that the region was given, and those."""
        self._given = tuple(tensors_in(self._given))
        self.makers = frozenset(makers_of(self._given))
        return self.makers

    def count_shortened(self, value: Value) -> None:
        """Count the reading of what a value's node saved and less is kept of."""
        for each in self.shortened.get(value.number + 1, ()):
            each.readers += 1

    def fills(self, value: Value, tensor: torch.Tensor) -> bool:
        """Whether a value whose cell is there is all that lies in a tensor's storage."""
        numel = self.found[value.at][2]
        return tensor.untyped_storage().nbytes() == numel * tensor.element_size()

    def keep(self, at: int, tensor: torch.Tensor, held: Any) -> None:
        """Note that a tensor is kept that replays read."""
        self._sources[at] = tensor.grad_fn, tensor.output_nr, Source(held, self._read)

    def value(self, value: Value, node: Node) -> SharedValue | None:
        """What readers of the value behind an edge share; None where it is another."""
        found = self.found.get(value.at)
        if found is not None:
            return found[1] if found[0] is node else None
        entry, makers = value.entry, self.makers
        if makers is None:
            makers = self.list_makers()
        if self._entries[type(node)] is not entry or node in makers:
            return None
        if node_number(node) - self._first != value.number:
            return None
        facts = output_facts(node)
        if facts is None or facts.dtype is not value.dtype or facts.device != value.device:
            return None
        cell = SharedValue(value.readers)
        if value.operands is None:
            if not entry.is_ready(node):
                return None
        else:
            fits = entry.rule.fits
            if not (value.is_own or is_unhooked(node)) or not (fits is None or fits(node)):
                return None
            cell.operands = self._operands(value, node)
            if cell.operands is None:
                return None
            cell.through = True
        if self.shortened:
            self.count_shortened(value)
        self.found[value.at] = node, cell, math.prod(facts.shape)
        return cell

    def _operands(self, value: Value, node: Node) -> tuple[Any, ...] | None:
        """What the replay of a node reads, as `rebuilt` takes it; None where that is other."""
        edges, found = node.next_functions, []
        if len(edges) != value.edges or value.operands is None:
            return None
        for each in value.operands:
            unless = each.unless
            is_there = unless is None or edges[unless][0] is not None
            if type(each) is Saved:
                if not is_there:
                    return None
                found.append(each.attribute)
                continue
            assert type(each) is AtEdge
            if unless is not None and is_there:
                return None
            operand = self._operand(each, *edges[each.edge])
            if operand is None:
                return None
            found.append(operand)
        return tuple(found)

    def _operand(self, at: AtEdge, node: Node, output: int) -> Any:
        """What is at an edge, and the views that lie before it, the last one first."""
        views: tuple[Any, ...] = ()
        for view, take in at.views:
            if type(node) is not view:
                return None
            views = (take, node, output), *views
            node, output = node.next_functions[0]
        if node is None:
            return None
        end = at.end
        if isinstance(end, Value):
            cell = None if output else self.value(end, node)
            return None if cell is None else ((node, cell), views)
        if end is None:
            is_leaf = type(node).__name__ == LEAF_NODE and is_plain(node.variable)
            return (node, views) if is_leaf else None
        kept = self._sources.get(end.at) if type(end) is Kept else self._given_at(end.at)
        if kept is None or kept[0] is not node or kept[1] != output:
            return None
        return kept[2], views

    def _given_at(self, at: int) -> tuple[Node, int, Source] | None:
        """What the region was given there, kept from now on."""
        key = -1 - at
        found = self._sources.get(key)
        if found is None:
            if at >= len(self._given) or not is_plain(self._given[at]):
                return None
            tensor = self._given[at]
            self.keep(key, tensor, keep(tensor, tensor.grad_fn))
            found = self._sources[key]
        return found

    def forget(self) -> None:
        """Let go of what only the forward needs."""
        self._given, self.makers = (), None
        for each in (self.found, self._sources, self.shortened):
            each.clear()
