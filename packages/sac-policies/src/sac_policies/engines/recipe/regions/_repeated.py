"""A forward that does what the one before it did, as long as it saves the same.

To decide on a tensor takes ten times as long as to see that it is where it was. So a function's
forward is written down (`_recorded`), and later ones follow its steps.

Rule 1. Each tensor is held against its step: the code that runs, the node that saves it, what
        kind of node made it. Of what is replayed all is looked at that decides whether it may be:
        the producer, its rule, the tensor's version, dtype and device, whether the producer saved
        its operands. What is kept may always be kept.
Rule 2. From the first tensor on that is not as its step says, the rest of the forward decides for
        itself, and knows what was done before (`_left`). The steps are written down anew.
Rule 3. Under others' saved-tensor hooks there are no steps. Where calls have to be seen, only those
        are that the steps have a use for, until a forward leaves them.
Rule 4. What waits for the end of the forward gets its recipe there if nobody wrote to what its
        replay may read, and stays kept else.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ...._torch_compat import (
    is_freed,
    node_number,
    packs_for_a_node,
    pop_hooks,
    push_hooks,
    sequence_number,
)
from ....policies._spans import followers
from ..._guards import small_copy
from .._calls import Calls, CallsMode
from .._formats import may_lie_otherwise
from .._proof import may_agree, proof_of, storage_of
from .._recipes import Outer, Reader, Recipe, Reconsidered, Result, keep
from .._replay import Node
from .._replay_entries import VIEW, ReplayTable, runs_on
from .._shared_values import SharedValue
from .._writes import Habit
from ._around import Packs
from ._followed import FollowedValues
from ._left import Held, Rest
from ._recorded import END, Later, Replayed, Shape, Watched
from ._region import UNSEEN
from ._remade import shortened
from ._remade_steps import Again, followed

_LEAF: Held = (None, 0, None)


class Repeated(Packs):
    """One forward that follows steps."""

    __slots__ = (
        *("_entries", "_first", "_given", "_habits", "_heeds", "_next", "_outers", "_read"),
        *("_held", "_late", "_notes", "_rest", "_seeing", "_sees", "_values"),
    )

    def __init__(
        self, shape: Shape, entries: ReplayTable, read: Reader, habits: Habit, given: Any
    ) -> None:
        self._next: Callable[[], Any] = iter(shape.steps or ()).__next__
        self._entries, self._read, self._habits, self._given = entries, read, habits, given
        self._sees = bool(habits.value) and bool(habits & Habit.FORGETS)  # the second is slow
        self._first = sequence_number()
        self._values = FollowedValues(entries, read, self._first, given)
        self._rest: Rest | None = None
        self._held: list[Held] = []
        self._outers: list[Outer | None] = []
        self._late: list[tuple[torch.Tensor, Reconsidered, Replayed]] = []
        self._heeds, self._notes = shape.heeds, shape.notes
        self._seeing: CallsMode | None = None

    def pack(self, tensor: torch.Tensor) -> Any:
        """Return what autograd is to hold instead of `tensor`."""
        number, kind, what = self._next()
        node: Node = tensor.grad_fn
        if type(node) is kind and sequence_number() - self._first == number:
            if what is None:  # as `keep` does: most of what is saved comes by here
                if node is None:
                    self._held.append(_LEAF)
                    return tensor, tensor._version, kind
                held: Any = tensor.detach(), tensor._version, kind
                self._held.append((node, tensor.output_nr, held))
                return held
            if type(what) is Replayed:
                held = self._recipe(tensor, node, what)
                if held is not None:
                    self._held.append((None, 0, held))
                    return held
            elif type(what) is Again:
                held = followed(self._values, tensor, number, what)
                if held is not None:
                    self._held.append(_LEAF)
                    return held
            elif type(what) is Later:
                return self._waits(tensor, node, number, what.replayed)
            elif what.source is None or tensor._version == what.version:
                held = self._watched(tensor, node, number, what)
                if held is not None:
                    self._held.append(_LEAF if node is None else (node, tensor.output_nr, held))
                    return held
        return self._other(tensor)

    def _watched(self, tensor: torch.Tensor, node: Node, number: int, what: Watched) -> Any:
        if what.is_loose:
            policy = self._entries.policy
            short = shortened(tensor, keep, self._read, policy, is_own=what.is_own)
            if short is not None:
                self._values.shortened.setdefault(number, []).append(short.cell)
                if what.is_read:
                    self._outers.append(None)
                return short
        held: Any = keep(tensor, node)
        if what.is_read:
            held = Outer(held, tensor, self._read)
            self._outers.append(held)
        if what.source is not None:
            self._values.keep(what.source, tensor, held)
        return held

    def _recipe(self, tensor: torch.Tensor, node: Node, step: Replayed) -> Recipe | None:
        """The recipe for a tensor; None where it may not have one."""
        output, entries, value = tensor.output_nr, self._entries, step.value
        wanted, values = value.entry, self._values
        entry = entries[type(node)]
        is_view = entry is VIEW
        while entry is VIEW:
            node, output = node.next_functions[0]
            entry = entries[type(node)]
        number = node_number(node)
        makers = values.makers
        if makers is None:
            makers = values.list_makers()
        if (
            entry is not wanted
            or output != 0
            or number - self._first != value.number
            or tensor._version != step.version
            or node in makers
        ):
            return None
        found = values.found.get(value.at)
        is_same = (type(tensor), tensor.dtype, tensor.device) == step.kind
        if value.operands is not None:
            cell = self._through(tensor, node, step)
            if cell is None:
                return None
        elif not is_same and wanted.device(tensor, node) != step.device:
            return None
        elif found is not None:
            cell = found[1]
            if found[0] is not node:
                return None
        elif not wanted.is_ready(node):
            return None
        else:  # as `values.value` does: many come by here
            cell = SharedValue(value.readers)
            if value.number + 1 in values.shortened:
                values.count_shortened(value)
            values.found[value.at] = node, cell, 0
        proof = proof_of(tensor) if entries.compares else None
        if step.is_first:
            if self._reads_freed(cell, node, step):
                return None
            self._protect(cell, node, step, proof)
        elif not may_agree(cell.proof, proof):
            cell.written = storage_of(tensor)
            return None
        made = node, entry, step.device, is_view, number
        recipe = (Result if step.is_result else Recipe)(tensor, made, cell, proof)
        if step.is_shown:
            # Read outside of its own backward, too.
            shown = Recipe(tensor, made, cell, proof) if step.is_result else recipe
            values.shown[tensor.grad_fn, tensor.output_nr] = shown
        return recipe

    def _waits(self, tensor: torch.Tensor, node: Node, number: int, step: Replayed) -> Any:
        """Keep a tensor until the forward has ended (Rule 4)."""
        first, version = self._first, tensor._version
        held = Reconsidered(keep(tensor, node), first + number, False, version, self._read)
        self._late.append((tensor, held, step))
        self._held.append((node, tensor.output_nr, held))
        return held

    def _reconsider(self) -> None:
        """Have recipes for what waited (Rule 4)."""
        if not (self._late and self._values.are_as_kept()):
            return
        for tensor, held, step in self._late:
            made = self._recipe(tensor, tensor.grad_fn, step)
            if made is not None:
                held.held = made

    def _through(self, tensor: torch.Tensor, node: Node, step: Replayed) -> SharedValue | None:
        """What readers of a value share that is replayed through edges, as `why_not` decides."""
        value = step.value
        if type(tensor) is not torch.Tensor or runs_on(tensor) != step.device:
            return None
        self._values.size_bytes = tensor.untyped_storage().nbytes()
        cell = self._values.value(value, node)
        if cell is None or not self._values.fills(value, tensor):
            return None
        if may_lie_otherwise(value.entry.rule.node, tensor, node, self._entries.compares):
            return None
        return cell

    def _reads_freed(self, cell: SharedValue, node: Node, step: Replayed) -> bool:
        """Whether a replay reads a parameter whose memory was freed, as `reads_freed` does."""
        if cell.through:
            return False
        rule = step.value.entry.rule
        outers = [self._outers[at] for at in step.outers]
        if any(outer is not None and outer.is_freed for outer in outers):
            return True
        leaf = None if rule.leaf is None else rule.leaf_of(node)
        return leaf is not None and is_freed(leaf)

    def _protect(self, cell: SharedValue, node: Node, step: Replayed, proof: Any) -> None:
        """Note what a value was, as `protect` does."""
        cell.protected, cell.proof = True, proof
        rule = step.value.entry.rule
        leaf = None if cell.through or rule.leaf is None else rule.leaf_of(node)
        if not self._entries.compares:
            if leaf is not None:
                cell.leaves = ((leaf, leaf._version),)
            return
        for at in step.outers:
            outer = self._outers[at]
            if outer is not None:
                outer.protect()
        if leaf is not None:
            cell.leaf = small_copy(leaf)

    def _other(self, tensor: torch.Tensor) -> Any:
        """Pack a tensor that is not as its step says, or comes after such a one (Rule 2)."""
        number, rest = 0, self.region
        if packs_for_a_node(depth=2):  # as `consumer` does
            number = sequence_number()
            rest.note(number)
        return rest.decided(tensor, number)

    @property
    def region(self) -> Rest:
        """What decides from here on (Rule 2)."""
        if self._rest is None:
            self._next = itertools.repeat(END).__next__
            self._rest = self._begin()
            self._rest.take(self._notes[: len(self._held)], self._held, self._outers)
            for tensor, held, _ in self._late:
                self._rest.products.resume(tensor, held)
            if self._seeing is not None:
                self._seeing.heed_all()
        return self._rest

    def _begin(self) -> Rest:
        """Make that, which knows nothing yet."""
        return Rest(self._entries, self._given, self._values, self._habits)

    def _close(self) -> None:
        """End a forward that did not take every step."""
        if self._rest is not None:
            self._rest.close()

    def _span(
        self, label: str, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        return self.region._span(label, run, args, kwargs)

    def run(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any, bool]:
        """Call the region's function under its hooks; return also whether it took every step."""
        seeing: Any = UNSEEN
        if self._sees:
            self._values.calls = calls = Calls()
            seeing = self._seeing = CallsMode(calls, self._values.keeps, self._heeds)
        stack, span = followers.stack, self._span
        try:
            push_hooks(self.pack, self._read)
            try:
                stack.append(span)
                try:
                    with seeing:
                        out = function(*args, **kwargs)
                finally:
                    stack.remove(span)
            finally:
                pop_hooks()
            is_whole = self._rest is None and self._next() is END
            if is_whole:
                self._reconsider()
            else:
                self._close()
            return out, is_whole
        finally:
            if self._rest is not None:
                self._rest.forget()
            # The graph holds the hooks, and they this.
            self._given, self._rest, self._outers, self._seeing = None, None, [], None
            self._values.forget()
            self._held.clear()
            self._late.clear()
