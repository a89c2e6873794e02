"""What replays read at edges, in a forward that follows: looked at, and taken.

Rule 1. Whatever is looked at is the node itself: its kind, its number, its edges, what it made.
        Where one is another than was written down (`_at_edges`), nothing is taken.
Rule 2. What is taken points where the graph does, to what was made before (Rules 1 and 4 of
        `_recipes`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from ...._torch_compat import node_number
from .._calls import Calls
from .._edges import is_plain, makers_of
from .._rebuilt import leaves_of
from .._recipes import Reader, keep
from .._replay import LEAF_NODE, Node, Rule, is_leaf_node, is_unhooked, output_facts
from .._replay_entries import VIEW, ReplayTable, Why
from .._shared_values import SharedValue, Source
from .._sources import source_of
from .._views import TAKES
from ._at_edges import AtEdge, Given, Kept, Saved, Seen, Value
from ._products import whole_of


def _is_no_view(node: Node) -> bool:
    return type(node).__name__ not in TAKES


def _is_kept(source: Source) -> bool:
    """Whether the value itself is held: not a copy, nor what hooks made of it."""
    return type(source.held) is tuple


class FollowedValues:
    """Those of one forward.

    Attributes:
        read: reads what is held.
        first: number of the first node that the forward may have made.
        policy: what decided, for messages.
        found: by value: its node, what its readers share, and how many elements it has where that
            is looked at.
        makers: nodes that made what the region was given; None until they are listed.
        again: what calls that are made again read, by and by.
        shown: recipes for values that calls made again read, by node and which of its outputs.
        shortened: by number, cells of what nodes saved and less is kept of, which replays read.
        calls: what nodes were given and do not know; None where that is not seen.
        size_bytes: of what is to be saved by what is looked for.
    """

    __slots__ = (
        *("_entries", "_given", "_results", "_sources", "_wholes"),
        *("again", "calls", "first", "found", "makers", "policy", "read", "shortened", "shown"),
        "size_bytes",
    )

    def __init__(self, entries: ReplayTable, read: Reader, first: int, given: Any) -> None:
        self._entries, self.read, self.first, self._given = entries, read, first, given
        self.policy = entries.policy
        self._sources: dict[int, tuple[Node, int, Source]] = {}
        self._wholes: dict[int, tuple[Node, int, Source]] = {}
        self._results: dict[Node, tuple[Node, int, Source]] = {}
        self.found: dict[int, tuple[Node, SharedValue, int]] = {}
        self.again: list[SharedValue] = []
        self.shown: dict[tuple[Node, int], Any] = {}
        self.makers: frozenset[Node] | None = None
        self.shortened: dict[int, list[SharedValue]] = {}
        self.calls: Calls | None = None
        self.size_bytes = 0

    def list_makers(self) -> frozenset[Node]:
        """List what made the tensors that the region was given and has a number of its nodes.

        What was made before has none, unless on another thread.
        """
        found: list[Node] = []
        for tensor in self._given:
            node = tensor.grad_fn
            if node is not None and node_number(node) < self.first and _is_no_view(node):
                continue
            found.extend(makers_of((tensor,)))
        self.makers = frozenset(found)
        return self.makers

    def keeps(self, tensor: torch.Tensor) -> bool:
        """Whether the policy keeps what made a tensor, past its views."""
        node: Node = tensor.grad_fn
        entries = self._entries
        while entries[type(node)] is VIEW:  # as `past_views` does, for each product that is seen
            node = node.next_functions[0][0]
        return entries[type(node)] is Why.POLICY

    def count_shortened(self, value: Value) -> None:
        """Count the reading of what a value's node saved and less is kept of."""
        for each in self.shortened.get(value.number + 1, ()):
            each.readers += 1

    def are_as_kept(self) -> bool:
        """Whether nobody wrote to what is kept that replays read."""
        for tensor, version in (each[2].held[:2] for each in self.sources() if _is_kept(each[2])):
            if tensor._version != version:
                return False
        return True

    def fills(self, value: Value, tensor: torch.Tensor) -> bool:
        """Whether a value whose cell is there is all that lies in a tensor's storage."""
        numel = self.found[value.at][2]
        return tensor.untyped_storage().nbytes() == numel * tensor.element_size()

    def sources(self) -> Iterable[tuple[Node, int, Source]]:
        """What is kept that replays read, what made it, and which of its outputs it is."""
        return *self._sources.values(), *self._results.values()

    def keep(self, at: int, tensor: torch.Tensor, held: Any) -> None:
        """Note that a tensor is kept that replays read."""
        self._sources[at] = tensor.grad_fn, tensor.output_nr, Source(held, self.read)

    def held(self, tensor: torch.Tensor) -> tuple[Source | None, bool]:
        """What is held of a value that a node made, and whether that stays as it is."""
        node, output = tensor.grad_fn, tensor.output_nr
        recipe = self.shown.get((node, output))
        if recipe is not None:
            self.again.append(recipe.cell)
            return Source(recipe, self.read), False
        for each in self._sources.values():
            if each[0] is node and each[1] == output:
                return each[2], True
        return None, True

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
        if node_number(node) - self.first != value.number:
            return None
        facts = output_facts(node)
        if facts is None or facts.dtype is not value.dtype or facts.device != value.device:
            return None
        cell = SharedValue(value.readers)
        if value.operands is None:
            if not entry.is_ready(node):
                return None
        else:
            unfit = entry.rule.unfit
            if not (value.is_own or is_unhooked(node)) or (unfit is not None and unfit(node)):
                return None
            cell.operands = self._operands(value, node)
            if cell.operands is None:
                return None
            cell.through = True
        if not self._entries.compares:
            cell.leaves = self._leaves(cell, node, entry.rule)
        if value.number + 1 in self.shortened:
            self.count_shortened(value)
        self.found[value.at] = node, cell, math.prod(facts.shape)
        return cell

    def _leaves(
        self, cell: SharedValue, node: Node, rule: Rule
    ) -> tuple[tuple[torch.Tensor, int], ...]:
        """As `leaves_of`, of what was taken."""
        if not cell.through:
            return leaves_of(node, rule, ())
        found = (each[0] for each in cell.operands or () if type(each) is not str)
        leaves = (base.variable for base in found if is_leaf_node(base))
        return tuple((leaf, leaf._version) for leaf in leaves)

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
            if type(each.end) is Seen:
                is_seen = each.edge >= len(edges) or edges[each.edge][0] is None
                operand = self._seen(node, each.end.at) if is_seen else None
            else:
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
        if isinstance(end, Kept):
            kept = self._whole_at(end.at) if end.is_whole else self._sources.get(end.at)
        else:
            kept = self._given_at(end.at) if isinstance(end, Given) else self._returned(node)
        if kept is None or kept[0] is not node or kept[1] != output:
            return None
        return kept[2], views

    def _seen(self, node: Node, at: int) -> Any:
        """An operand that a call was given in this forward, where it is of use."""
        calls = self.calls
        constant = None if calls is None else calls.operand(node, node_number(node), at)
        if constant is None or not constant.pays(self.size_bytes):
            return None
        return source_of(constant, keep, self.read, True), ()

    def _whole_at(self, at: int) -> tuple[Node, int, Source] | None:
        """What is kept there by a view of it, and what made it."""
        found = self._wholes.get(at)
        kept = None if found is not None else self._sources.get(at)
        if kept is None or type(kept[2].held) is not tuple:
            return found
        node, output, source = kept
        node, output = self._entries.past_views(node, output)
        tensor, *_ = source.held
        whole = whole_of(tensor, source.held, node, output, self.read)
        if whole is None:
            return None
        found = self._wholes[at] = node, output, Source(whole, self.read)
        return found

    def _returned(self, node: Node) -> tuple[Node, int, Source] | None:
        """What a call returned that the policy keeps, of use here or for what came before."""
        found = self._results.get(node)
        calls = None if found is not None else self.calls
        if calls is None:
            return found
        tensor = calls.result(node_number(node), self.size_bytes)
        if tensor is None or tensor.grad_fn is not node:
            return None
        found = self._results[node] = node, 0, Source(keep(tensor, node), self.read)
        return found

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
        if self.calls is not None:
            self.calls.clear()
        self.again.clear()
        for each in (self.found, self._sources, self._wholes, self.shortened, self.shown):
            each.clear()
        self._results.clear()
