"""Pushes saved-tensor hooks; the eager engine without dispatch mode or second forward.

When autograd saves a tensor, the hook looks at the node that produced it. Where the policy does
not keep that node's output and a replay rule can rebuild it, a *recipe* (the node, what to do)
is saved instead; backward replays it for its consumer. Rules 1 to 4 are those of `_recipes.py`.

Rule 5. A value made before the region began is its caller's, and one made under saved-tensor
        hooks inside it (another checkpoint) is theirs: it is kept. Their nodes may be read once.
Rule 6. Kept tensors go through the saved-tensor hooks around the region.
Rule 7. What nothing can rebuild is kept, whatever the policy says of recomputing it. So is what
        was written to since an operator made it: a replay would not repeat the writing. One write
        may be that operator itself, as where `linear` adds its bias in place, which it does not
        under a dispatch mode: what is then rebuilt through edges is compared with what it was.
Rule 8. What is kept because it reads what the policy saves, and that nobody has saved yet, is
        asked for again when the forward ends: one of two would be kept for nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.weak import WeakIdKeyDictionary

from .... import _torch_compat
from ...._torch_compat import (
    Hooks,
    node_number,
    packs_for_a_node,
    saved_tensor_hooks,
    sequence_number,
)
from ....policies._decisions import Decision
from ....policies._policies import DEPENDS
from ....policies._spans import SPAN_OP, following
from ....policies._views import Operator
from .._calls import CallsMode
from .._edges import Follower
from .._own_rules import gets_a_rule
from .._proof import may_agree, proof_of, storage_of
from .._recipes import (
    Found,
    Hooked,
    Outer,
    Outers,
    Recipe,
    Reconsidered,
    Result,
    keep,
    protect,
    reader,
    reads_freed,
)
from .._replay import Node
from .._replay_entries import STUCK, VIEW, Decides, ReplayTable, Why, runs_on
from .._sources import Edges
from .._writes import Habit, Observer
from ._around import Packs, region_around
from ._learned import Learned
from ._products import Products
from ._remade import instead
from ._span_calls import SpanCall, made_by_span, run_span

UNSEEN: AbstractContextManager[None] = nullcontext()


class Region(Packs):
    """One forward of one region: packs what autograd saves meanwhile.

    Attributes:
        edges: what it knows of values that replays can read.
        unpack: what autograd calls with what `pack` returned.
        learned: what later forwards of the function are to mind, once the first has ended.
        spans: calls of spans that are running, innermost last.
    """

    _around: Hooks | None
    edges: Edges
    learned = Habit.NONE
    _base: tuple[Node, int] = (None, 0)
    """What made the tensor that was asked for last, past its views, and which of its outputs."""
    _is_result = False
    """Whether the tensor that `producer` was asked of last is saved by its own node."""

    def __init__(
        self,
        entries: ReplayTable,
        given: tuple[Any, ...] = (),
        decides: Decides | None = None,
        is_outermost: bool = False,
        first: int | None = None,
    ) -> None:
        self._entries, self._decides = entries, decides or entries
        self._first = sequence_number() if first is None else first
        outer: Region | None = None if is_outermost else region_around()
        self._is_inside = outer is not None
        self.spans: list[SpanCall] = []
        for call in () if outer is None else outer.spans:
            call.stopped = True
        self.edges = edges = Edges() if outer is None else outer.edges
        # Numbers after those of nodes that were being made when `pack` was called (Rule 5).
        self._own = edges.own
        self.note = self._own.add
        self.outers: Outers = {} if outer is None else outer.outers
        around = saved_tensor_hooks() if outer is None else outer._around
        self._around = around = None if is_outermost else around
        self.keep = keep if around is None else partial(Hooked, hooks=around)
        self.read = self.unpack = reader(entries.policy)
        self._follow = Follower(edges, self._decides, self._first, given, self.keep, self.read)
        self._makers = self._follow.makers
        self._learned, self.products = Learned(), Products(edges, self.read)

    def pack(self, tensor: torch.Tensor) -> Any:
        """Return what autograd is to hold instead of `tensor`."""
        number = 0
        if packs_for_a_node(depth=1):  # as `consumer` does
            self.note(number := sequence_number())
        return self.packed(tensor, number)

    def packed(self, tensor: torch.Tensor, number: int) -> Any:
        """Do the same for the node before the one with this number, 0 for none."""
        node: Node = tensor.grad_fn
        if node is None:
            return self.hold(tensor, None, number, Why.LEAF)
        self._base = node, tensor.output_nr
        found: Any = self._entries[type(node)]
        if type(found) is not Why:
            found = self.producer(tensor, node, found, number)
            if type(found) is not Why:
                return self.recipe(tensor, number, found)
        if found is Why.FUNCTION and gets_a_rule(self._base[0]):
            return self.packed(tensor, number)
        return self.hold(tensor, node, number, found)

    def recipe(self, tensor: torch.Tensor, number: int, found: Found) -> Any:
        """Make the recipe for a tensor; `number` is as for `hold`.

        Where something wrote to it since another node saved it, both have it as it is.
        """
        node, entry, _, _, own_number = found
        edges = self.edges
        cell = edges.cell(node)
        if not cell.distance and reads_freed(self.outers, found):
            return self.hold(tensor, tensor.grad_fn, number, Why.FREED)
        if edges.made is not None:
            self._learned.rebuilt(tensor, own_number)
            edges.note_made(tensor, cell)
        compares = self._entries.compares
        proof = proof_of(tensor) if compares else None
        if not cell.protected:
            if cell.distance is None:  # the node saved all that its rule reads
                cell.distance = 0
            if not cell.registered:
                self._follow.register(node, own_number, entry.rule, cell)
            protect(cell, proof, self.outers if compares else None, found)
        elif not may_agree(cell.proof, proof):
            cell.written = storage_of(tensor)
            return self.hold(tensor, tensor.grad_fn, number, Why.WRITTEN)
        cell.readers += 1
        if self._is_result:
            # Its replay reads what the node saved, when the node has read that already.
            for each in edges.unpacked.get(number, ()):
                each.stay()
            return Result(tensor, found, cell, proof)
        edges.saved(cell, number, own_number)
        return Recipe(tensor, found, cell, proof)

    def run(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Call the region's function under its hooks."""
        seeing = self._seeing() if self.edges.forgets else UNSEEN
        try:
            with saved_tensors_hooks(self.pack, self.unpack), seeing, following(self._span):
                out = function(*args, **kwargs)
            self.close()
            if self.edges.made is not None and not self.is_in_hooks:  # `_run`, Rule 2
                calls_custom = Habit.OPAQUE in self.edges.habit
                policy = self._entries.policy
                self.learned = self._learned.habit(policy, self._follow, calls_custom)
            return out
        finally:
            self.forget()

    def _seeing(self) -> CallsMode:
        return CallsMode(self.edges.calls, self._follow.keeps)

    def forget(self) -> None:
        """Let go of what only the forward needs: the graph holds the hooks, and they the region."""
        self._base = None, 0
        self._follow.forget()
        self.products.forget()
        if not self._is_inside:
            self.edges.forget()

    def try_calls(self) -> None:
        """See calls in this forward, the function's first, to find out what they are good for."""
        self.mind(Habit.FORGETS)
        self._follow.only_tries = True

    @property
    def is_in_hooks(self) -> bool:
        """Whether there are saved-tensor hooks around the region (Rule 6)."""
        return self._around is not None

    def mind(self, habit: Habit) -> None:
        """Replay from now on only what such a region allows: see `_writes`."""
        self.edges.mind(habit)

    def watched(self, function: object) -> Observer:
        """Have a forward of the function watched: it may write where autograd sees nothing."""
        self.edges.made = WeakIdKeyDictionary()
        return Observer(function, self.mind, self.edges.wrote)

    def consumer(self) -> int:
        """Note the node that is being made; return the number after its own, 0 without one."""
        if not packs_for_a_node(depth=2):
            return 0
        self.note(number := sequence_number())
        return number

    def hold(self, tensor: torch.Tensor, node: Node, number: int, why: Why) -> Any:
        """Keep a tensor; `number` is that of the first node after the one that reads it.

        It is 0 where none does: a checkpoint inside saves its inputs.
        """
        edges = self.edges
        if self.spans or edges.spans_returned:
            value = made_by_span(self, tensor, node, number, why)
            if value is not None:
                return value
        if edges.made is not None and why in STUCK:
            self._learned.stuck(tensor)
        if node is None and number and not tensor.requires_grad:
            short = instead(self, self._follow, tensor, number, self._entries.policy)
            if short is not None:
                edges.cells.setdefault(number, []).append(short.cell)
                return short
        if self._around is None:  # as `keep` does: most of what is saved comes by here
            held: Any = tensor if node is None else tensor.detach(), tensor._version, type(node)
        else:
            held = self.keep(tensor, node)
        if number:
            if self._around is not None:
                edges.unpacked.setdefault(number, []).append(held.cell)
            if why is Why.LEAF or why is Why.CALLERS or self._is_outer(self._base[0]):
                held = Outer(held, tensor, self.read)
                self.outers.setdefault(number, []).append(weakref.ref(held))
        if node is None:
            return held
        if why is Why.POLICY:
            self.products.keep(tensor, held, *self._base)
        elif why is Why.OPERAND and number:
            held = self.products.wait(tensor, held, number, self._is_result)
        if why is not Why.WRITTEN:
            edges.outputs(why)[node, tensor.output_nr] = held
        return held

    def _span(
        self, label: str, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call the code of a span, unless it is in a region inside or under others' hooks."""
        if region_around() is not self:
            return run(*args, **kwargs)
        return run_span(self, label, run, (args, kwargs), self.saves_span())

    def saves_span(self) -> bool:
        """Whether the policy saves what runs in the span that begins."""
        policy = self._entries.policy
        return policy is not None and policy.constant(SPAN_OP) is Decision.SAVE

    def stuck(self, tensor: torch.Tensor) -> Why | None:
        """Why a tensor would be kept; None where it would not."""
        node = tensor.grad_fn
        entry = self._entries[type(node)]
        found = entry if isinstance(entry, Why) else self.producer(tensor, node, entry, 0)
        return found if isinstance(found, Why) else None

    def saves(self, op: Operator, number: int) -> bool:
        """Whether the policy saves, or may save, what an operator made when this was next."""
        policy = self._entries.policy
        return policy is not None and policy.constant(op) in (Decision.SAVE, DEPENDS)

    def _is_outer(self, base: Node) -> bool:
        """Whether what a node made, behind no views, was not made in the region."""
        before = node_number(base) < self._first or base in self._makers
        return before or self._entries[type(base)] is Why.LEAF

    def producer(self, tensor: torch.Tensor, node: Node, entry: Any, consumer: int) -> Found | Why:
        """Follow views to the producer, or say why nothing is to replay it."""
        output, is_view = tensor.output_nr, entry is VIEW
        while entry is VIEW:
            node, output = node.next_functions[0]
            entry = self._entries[type(node)]
        self._base = node, output
        if type(entry) is Why:
            return entry
        if self.edges.writes_uncounted:
            return Why.UNSEEN
        number = node_number(node)
        if number < self._first or node in self._makers:
            return Why.CALLERS
        if output != 0:
            return Why.OTHER_OUTPUT
        if entry.is_own and consumer == number + 1:
            return Why.RESULT
        is_result = entry.rule.keeps_result and consumer != 0 and self.edges.ends(number)
        self._is_result = is_result
        if is_result and not _torch_compat.KNOWS_CURRENT_NODE:
            return Why.RESULT
        version = tensor._version
        written = version != 0 and not self._as_made(tensor, node, is_result)
        device = entry.device(tensor, node)
        if written and (device is not Why.NOT_SAVED or version > 1):
            return Why.WRITTEN
        if device is Why.NOT_SAVED:
            why = self._follow.why_not(node, number, entry, tensor)
            return (node, entry, runs_on(tensor), is_view, number) if why is None else why
        if number + 1 not in self._own:
            return Why.OTHER_HOOKS
        if type(device) is Why:
            return device
        return node, entry, device, is_view, number

    def _as_made(self, tensor: torch.Tensor, node: Node, is_result: bool) -> bool:
        """Whether an output that was written to is as its operator returned it.

        An in-place operator saves its result as it has just written it, whoever wrote there before.
        """
        cell = self.edges.cell(node)
        if is_result:
            cell.version = tensor._version
        return tensor._version == cell.version

    def close(self) -> None:
        """Check at the end of the forward what only then is known."""
        self.edges.leave(self._first, sequence_number(), self._decides)
        if self.products.are_kept:
            self._follow.ask_again()
            for tensor, kept in self.products.waiting():
                self._reconsider(tensor, kept)

    def _reconsider(self, tensor: torch.Tensor, kept: Reconsidered) -> None:
        """Have a recipe for what was kept for want of an operand that is kept now (Rule 8)."""
        node = tensor.grad_fn
        found = self.producer(tensor, node, self._entries[type(node)], 0)
        if isinstance(found, Why) or (kept.is_result and not self.edges.withdraw(tensor, kept)):
            return
        self._is_result = kept.is_result
        kept.held = self.recipe(tensor, kept.number, found)
