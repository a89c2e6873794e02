"""Writes down what autograd saves in one forward, with what its calls are given and without.

A region that sees calls makes a few more values again, but it takes time to see them in every
forward. So a profile is of both, and `_solve` takes the one that costs less.

Rule 1. Both are asked about each tensor, by hooks of one forward: it is not run twice for that.
Rule 2. Where regions or spans inside have a say, only the one that sees calls knows of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from .._torch_compat import lies_in_storage, sequence_number, storage_bytes, storage_under
from ..engines._guards import unnoticed
from ..engines.recipe._calls import Calls, CallsMode
from ..engines.recipe._filled import filling_of, narrowed
from ..engines.recipe._masks import are_flags, bits_of
from ..engines.recipe._replay import Node
from ..engines.recipe._replay_entries import Why, every_rule
from ..engines.recipe._writes import Habit
from ..engines.recipe.regions._held_constants import HeldConstant, held_behind, held_for, seen_in
from ..engines.recipe.regions._region import Region
from ..engines.recipe.regions._remade import remade
from ..engines.recipe.untracked._seen_calls import Remade
from ._constants import TracedConstant
from ._trace import TracedPack

_CALLS, _ROUNDS = 64, 3
"""Calls that are clocked at a time, and how often."""


@dataclass(frozen=True, slots=True)
class Made:
    """Which call made a storage, and which of that call's storages it is."""

    call: int
    output: int


Makers = Callable[[torch.UntypedStorage], "Made | None"]
"""Tells who made a storage; None for what the function was given."""


class _Noting(Region):
    """Writes down every tensor that autograd saves.

    Attributes:
        packs: what it has written down.
        constants: what is held besides, for what is made again.
    """

    def __init__(self, made: Makers, given: tuple[Any, ...], is_outermost: bool = False) -> None:
        super().__init__(every_rule, given, is_outermost=is_outermost)
        self._made = made
        self.packs: list[TracedPack] = []
        self.constants: list[TracedConstant] = []
        self._places: dict[Any, int] = {}
        self._seen: set[tuple[Node, int]] = set()

    def saw(self, tensor: torch.Tensor, number: int) -> Any:
        """Note a tensor that the node before this number saves, then keep it."""
        self.note(number)
        node = tensor.grad_fn
        found = self.producer(tensor, node, self._entries[type(node)], number)
        storage = storage_under(tensor)
        made = (None if storage is None else self._made(storage)) or Made(-1, 0)
        if isinstance(found, Why):
            producer, again = "", self._again(tensor, number) if node is None else None
            read = held_for(again, self.edges, self._seen)
            size = 0 if again is not None else self._size(tensor)
        else:
            producer, read = found[1].rule.node, held_behind(found[0], self.edges, self._seen)
            size = unnoticed(storage_bytes, tensor)
        reads = tuple(sorted({at for each in read if (at := self._place(each)) is not None}))
        self.packs.append(TracedPack(producer, made.call, made.output, size, reads))
        held = self.keep(tensor, node)
        if node is not None and found is not Why.WRITTEN:
            self._seen.add((node, tensor.output_nr))
        if node is not None and isinstance(found, Why) and found is not Why.WRITTEN:
            self.edges.outputs(found)[node, tensor.output_nr] = held
        return held

    def _again(self, tensor: torch.Tensor, number: int) -> Remade | None:
        """What is held of a tensor without a gradient that calls make again; None of others."""
        if tensor.requires_grad or not lies_in_storage(tensor):
            return None
        return remade(self, self._follow, tensor, number, None)

    def _place(self, held: HeldConstant) -> int | None:
        """Where a constant is written down; None for one of the caller's, who holds it anyway."""
        made, key, size = Made(-1, 0), held.key, held.copy_bytes
        if not size:
            storage = None if held.tensor is None else storage_under(held.tensor)
            maker = None if storage is None else self._made(storage)
            if storage is None or maker is None:
                return None
            made = key = maker
            size = storage.nbytes()
        place = self._places.setdefault(key, len(self.constants))
        if place == len(self.constants):
            self.constants.append(TracedConstant(made.call, made.output, size))
        return place

    def forget(self) -> None:
        """Let go of what only the forward needs."""
        super().forget()
        self._seen.clear()
        self._places.clear()

    def _size(self, tensor: torch.Tensor) -> int:
        """Bytes that the engine keeps of a tensor that nothing makes again."""
        if tensor.grad_fn is not None or not lies_in_storage(tensor):
            return unnoticed(storage_bytes, tensor)
        bits = bits_of(tensor)
        short = filling_of(tensor) if bits is None else bits[0]
        if short is None and are_flags(tensor):
            return (tensor.numel() + 7) // 8
        if short is None and self.edges.calls.untracked.makes(tensor):
            short = narrowed(tensor)
        return (tensor if short is None else short).untyped_storage().nbytes()


class SavedTensors(_Noting):
    """The same as the hook of a forward, with what calls are given and without.

    Attributes:
        unseen: what a region writes down that does not see calls; None where regions or spans
            inside have a say.
        calls: how many were seen.
    """

    unseen: tuple[TracedPack, ...] | None = None

    def __init__(self, made: Makers, given: tuple[Any, ...]) -> None:
        super().__init__(made, given)
        self._without = _Noting(made, given, is_outermost=True)
        self._has_spans = False
        self._mode = _CountedCalls(self.edges.calls, self._follow.keeps)

    @property
    def calls(self) -> int:
        """How many calls were seen."""
        return self._mode.count

    def mind(self, habit: Habit) -> None:
        """Note what the region does, for both."""
        super().mind(habit)
        self._without.mind(habit & ~Habit.FORGETS)

    def pack(self, tensor: torch.Tensor) -> Any:
        """Note the tensor twice, then keep it."""
        number = sequence_number()
        self._without.saw(tensor, number)
        return self.saw(tensor, number)

    def close(self) -> None:
        """Take what was noted without calls, if nothing else had a say."""
        for held in seen_in(self.edges.calls):
            self._place(held)
        super().close()
        if len(self.edges.inside) == 1 and not self._has_spans:  # itself
            self.unseen = tuple(self._without.packs)

    def forget(self) -> None:
        """Let go of what only the forward needs."""
        super().forget()
        self._without.forget()

    def _span(self, *args: Any) -> Any:
        self._has_spans = True
        return super()._span(*args)

    def _seeing(self) -> CallsMode:
        return self._mode


class _CountedCalls(CallsMode):
    """Counts the calls that it sees.

    Attributes:
        count: how many there were.
    """

    count = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if not torch.compiler.is_compiling():  # a compiler would guard on it
            self.count += 1
        return super().__torch_function__(func, types, args, kwargs)


@lru_cache
def nanoseconds_of_a_call() -> int:
    """What it takes to see a call of which there is nothing to note."""
    value = torch.zeros(1, device="cpu")

    def clocked() -> int:
        began = time.perf_counter_ns()
        for _ in range(_CALLS):
            value.neg()
        return time.perf_counter_ns() - began

    plain = min(clocked() for _ in range(_ROUNDS))
    with CallsMode(Calls()):
        seen = min(clocked() for _ in range(_ROUNDS))
    return max(0, seen - plain) // _CALLS
