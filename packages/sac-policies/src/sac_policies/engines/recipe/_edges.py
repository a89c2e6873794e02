"""Finds what a replay reads and autograd did not save: through a node's edges.

Rule 1. An edge leads to the node that made an operand. Its value is had from a leaf, from what
        the region was given or keeps, or by a replay of that node, which may follow edges too.
        What needs no gradient has no edge: it is known where a mode saw it (`_calls`).
Rule 2. Views on the way are taken again from what their nodes know.
Rule 3. A copy is rebuilt row-major, as `contiguous` and `reshape` make it. Its node does not know
        the memory format: where autograd saved the copy it must show there, and on the way it is
        taken for granted unless the function was seen to copy otherwise (`_writes`).
Rule 4. A policy's decision for an operator holds on the way as well: what it saves is not
        replayed for others. In a region inside, the inner policy decides.
Rule 5. Whether a value can be rebuilt depends on the graph alone, not on what a plan keeps.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from ..._tensors import tensors_in
from ..._torch_compat import is_fake, is_freed, node_number
from ._formats import CLONE, TO_COPY, may_lie_otherwise
from ._own_rules import gets_a_rule, known_rule
from ._rebuilt import leaves_of
from ._replay import LEAF_NODE, Node, Rule, is_unhooked, output_facts
from ._replay_entries import Decides, ReplayEntry, ReplayTable, Why
from ._shared_values import SharedValue, Source
from ._sources import Edges, living, source_of
from ._spans import SpanOutput, SpanValue
from ._views import TAKES
from ._writes import Habit

MOST_EDGES = 32
"""A replay follows at most so many, one after the other; the value at the end is kept."""

_RESHAPED = "UnsafeViewBackward0"


class Follower:
    """Follows edges for one region.

    Attributes:
        edges: shared with the regions around and inside.
        keep: keeps a tensor that the region was given and replays read.
        makers: nodes that made what the region was given.
        used_bytes: of values that are rebuilt with what only a mode saw, or could be.
        only_tries: whether nothing is kept for replays that is not saved (`_calls`, Rule 4).
    """

    def __init__(
        self,
        edges: Edges,
        entries: Decides,
        first: int,
        given: tuple[Any, ...],
        keep: Callable[[torch.Tensor, Node], Any],
        read: Callable[[Any], torch.Tensor],
    ) -> None:
        self.edges = edges
        self._entries, self._compares = entries, entries.compares
        self._table = entries if type(entries) is ReplayTable else None
        self._first = first
        self._given: tuple[Any, ...] | None = given
        self.makers = set(makers_of(given))
        self.keep = keep
        self._read = read
        self._fake = False
        self._size_bytes = 0
        self.used_bytes = 0
        self.only_tries = False
        self._blocked: list[SharedValue] = []

    def why_not(
        self, node: Node, number: int, entry: ReplayEntry, tensor: torch.Tensor
    ) -> Why | None:
        """Why a saved tensor that this node made, past views, has no replay through edges."""
        if self.edges.writes_unseen:
            return Why.UNSEEN
        facts = output_facts(node)
        if facts is None or not fills(facts.shape, tensor):
            return Why.FORMAT
        self._size_bytes = tensor.untyped_storage().nbytes()
        self._fake = is_fake(tensor)
        rule = entry.rule.node
        if rule == TO_COPY and self.edges.copies and tensor.grad_fn is not node:
            return Why.FORMAT
        if may_lie_otherwise(rule, tensor, node, self._compares):
            return Why.FORMAT
        distance = self.distance(node, number, entry)
        return distance if isinstance(distance, Why) else None

    def distance(self, node: Node, number: int, entry: ReplayEntry, left: int = MOST_EDGES) -> Any:
        """How many edges a replay of the node follows, or why there is none."""
        edges = self.edges
        cell = node.metadata.get(edges.key) or edges.cell(node)
        found = cell.distance
        if found is None:
            ready = entry.is_ready(node)
            found = (self._ready if ready else self._distance)(node, number, entry, left)
            cell.distance = found
            if found is Why.OPERAND:
                self._blocked.append(cell)
        return found

    def ask_again(self) -> None:
        """Look again for what could not be had: more is kept by now."""
        for cell in self._blocked:
            cell.distance = None
        self._blocked.clear()

    def _ready(self, node: Node, number: int, entry: ReplayEntry, left: int) -> Any:
        """The same for a node that saved all that its rule reads."""
        if number + 1 not in self.edges.own:
            return Why.OTHER_HOOKS
        works = entry.works_for(output_facts(node), self._fake, False)
        return 0 if works else Why.RULE_IS_OFF

    def _distance(self, node: Node, number: int, entry: ReplayEntry, left: int) -> Any:
        """The same for one that did not."""
        rule = entry.rule
        if rule.unfit is not None and rule.unfit(node):
            return Why.UNFIT
        if rule.through is None:
            return Why.NOT_SAVED
        if not left:
            return Why.TOO_FAR
        if number + 1 not in self.edges.own and not is_unhooked(node):
            return Why.OTHER_HOOKS
        farthest = 0
        for at, edge in rule.at_edges(node):
            found = (
                self._constant_of(node, number, at)
                if edge[0] is None
                else self._operand(*edge, left - 1)
            )
            if type(found) is Why:
                return found if found is Why.TOO_FAR else Why.OPERAND
            if found > farthest:
                farthest = found
        if farthest >= MOST_EDGES:
            return Why.TOO_FAR
        works = entry.works_for(output_facts(node), self._fake, True)
        return farthest + 1 if works else Why.RULE_IS_OFF

    def _operand_of(
        self, node: Node, number: int, at: int, edge: tuple[Node, int], left: int
    ) -> Any:
        """How far an operand of a node with this number is, or why it cannot be had."""
        if edge[0] is not None:
            return self._operand(*edge, left)
        return self._constant_of(node, number, at)

    def _constant_of(self, node: Node, number: int, at: int) -> Any:
        constant = self.edges.calls.operand(node, number, at)
        if constant is None or not constant.pays(self._size_bytes):
            return Why.OPERAND
        self.used_bytes += self._size_bytes
        return 0

    def _operand(self, node: Node, output: int, left: int) -> Any:
        """How far the value behind an edge is, or why it cannot be had (Rule 1)."""
        edges, reshaped = self.edges, False
        kept, returned = edges.kept, not edges.calls.kept_nothing
        while True:
            if node is None:
                return Why.OPERAND
            name = type(node).__name__
            if name == LEAF_NODE:
                leaf = node.variable
                if is_freed(leaf):
                    return Why.FREED
                return 0 if is_plain(leaf) else Why.SUBCLASS
            if (node, output) in kept:
                return 0
            number = node_number(node)
            if returned and output == 0 and self._is_returned(node, number):
                return 0
            if number < self._first or node in self.makers:
                return 0 if self._is_given(node, output) else Why.CALLERS
            if name not in TAKES:
                break
            reshaped = name == _RESHAPED
            node, output = node.next_functions[0]
        table = None if edges.inside else self._table
        entry = edges.entry(node, number, self._entries) if table is None else table[type(node)]
        if entry is Why.FUNCTION and gets_a_rule(node):
            return self._operand(node, output, left)
        if type(entry) is Why or output != 0:
            return entry if type(entry) is Why else Why.OTHER_OUTPUT
        if edges.copies and (name == TO_COPY or (name == CLONE and not reshaped)):
            return Why.FORMAT
        return self.distance(node, number, entry, left)

    def blocker(self, node: Node) -> tuple[Node, int, Why]:
        """Return the first node on the way to an operand that cannot be had, and why.

        The node is None where an operand needs no gradient.
        """
        number = node_number(node)
        for at, edge in known_rule(type(node)).at_edges(node):
            why = self._operand_of(node, number, at, edge, MOST_EDGES)
            if not isinstance(why, Why):
                continue
            maker, output = edge
            while maker is not None and type(maker).__name__ in TAKES:
                if self.is_before(maker, node_number(maker)):
                    return maker, output, why
                maker, output = maker.next_functions[0]
            deeper = maker is not None and why is Why.OPERAND
            return self.blocker(maker) if deeper else (maker, output, why)
        return None, 0, Why.OPERAND

    def keeps(self, tensor: torch.Tensor) -> bool:
        """Whether the policy keeps what made a tensor, past its views."""
        node: Node = tensor.grad_fn
        while type(node).__name__ in TAKES:
            node = node.next_functions[0][0]
        return self._entries.entry(node, node_number(node)) is Why.POLICY

    def forget(self) -> None:
        """Let go of what the region was given."""
        self._given = None
        self.makers.clear()
        self._blocked.clear()

    def is_before(self, node: Node, number: int) -> bool:
        """Whether a node was made before the region began.

        Each thread numbers its nodes for itself, and what a region is given may be of another one,
        as where a checkpoint runs it again in a backward: its makers are told by themselves.
        """
        return number < self._first or node in self.makers

    def _is_given(self, node: Node, output: int) -> bool:
        """Whether the caller gave the region this value; it is kept from now on."""
        if self._given is None:
            return False
        for tensor in tensors_in(self._given):
            if tensor.grad_fn is node and tensor.output_nr == output and is_plain(tensor):
                self.edges.keep(tensor, self.keep(tensor, node))
                return True
        return False

    def _is_returned(self, node: Node, number: int) -> bool:
        """Whether this output is what the policy keeps and nobody saved; it is kept from now on."""
        named = self.edges.calls.named(number)
        if named is not None:
            self.edges.keep(named, self.keep(named, node))
            return True
        tensor = self.edges.calls.result(number, self._size_bytes)
        if tensor is None or self.edges.habit & Habit.REWRITES:
            return False
        self.used_bytes += self._size_bytes
        if self.only_tries:
            self.edges.calls.try_result(tensor)
            return False
        self.edges.keep(tensor, self.keep(tensor, node))
        return True

    def register(self, node: Node, number: int, rule: Rule, cell: SharedValue) -> None:
        """Count the readings of a node's replay with what it reads; once for each cell."""
        cell.registered, far = True, cell.distance  # 0 where the node saved all, and it is known
        is_ready = far == 0 if type(far) is int else rule.ready(node)
        at_edges = [] if is_ready else rule.at_edges(node)
        if rule.operands is not None:
            for each in self.edges.cells.get(number + 1, ()):
                each.readers += 1
        if not self._compares:
            cell.leaves = leaves_of(node, rule, at_edges)
        if is_ready:
            return
        cell.through, cell.held = True, {}
        sources: dict[Source, None] = {}
        for at, edge in at_edges:
            views, found = (
                (0, (self._constant(node, number, at),))
                if edge[0] is None
                else self._read_edge(*edge)
            )
            sources.update(dict.fromkeys(found))
            if views is not None:
                cell.held[at] = views, weakref.ref(found[0])
        cell.sources = tuple(map(weakref.ref, sources))

    def _constant(self, node: Node, number: int, at: int) -> Source:
        """What a replay reads of an operand that its node does not know."""
        constant = self.edges.calls.operand(node, number, at)
        assert constant is not None
        copies = not self._fake
        make = partial(source_of, constant, self.keep, self._read, copies)
        return self.edges.source_at((number, at), make)

    def _read_edge(self, node: Node, output: int) -> tuple[int | None, tuple[Source, ...]]:
        """Return what is kept for an operand, and behind how many views where it is kept itself."""
        views, edges = 0, self.edges
        while (name := type(node).__name__) != LEAF_NODE:
            held = edges.held(node, output)
            if held is not None:
                if isinstance(held, (SpanOutput, SpanValue)):
                    held.cell.readers += 1
                return views, (edges.source(node, output, held, self._read),)
            if name not in TAKES:
                cell = node.metadata.get(edges.key) or edges.cell(node)
                if not cell.registered:
                    self.register(node, node_number(node), known_rule(type(node)), cell)
                cell.readers += 1
                return None, living(cell)
            node, output = node.next_functions[0]
            views += 1
        return None, ()


def fills(shape: torch.Size, tensor: torch.Tensor) -> bool:
    """Whether an output of this shape is all there is in a tensor's storage."""
    return tensor.untyped_storage().nbytes() == math.prod(shape) * tensor.element_size()


def is_plain(tensor: torch.Tensor) -> bool:
    kind = type(tensor)
    return kind is torch.nn.Parameter or kind is torch.Tensor or is_fake(tensor)


def makers_of(given: tuple[Any, ...]) -> Iterator[Node]:
    """The nodes behind tensors, those of their bases among them."""
    for tensor in tensors_in(given):
        node = tensor.grad_fn
        while node is not None:
            yield node
            node = node.next_functions[0][0] if type(node).__name__ in TAKES else None
