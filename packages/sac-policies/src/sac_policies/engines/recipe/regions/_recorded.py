"""A forward that is written down, so that later ones need not decide it all again.

A step tells of one tensor that autograd saves: where it was asked for, and what became of it.
What is taken from a step holds in every forward, or is looked at again (`_repeated`).

Rule 1. Steps are made of a forward whose tensors are each kept, made again by calls
        (`_remade_steps`), or replayed from what nodes saved and the region knows (`_at_edges`).
        What waited for the forward's end, and is replayed then, waits again. Where others' hooks,
        regions inside or spans have a say, or a replay reads something else, every forward decides
        for itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...._torch_compat import node_number, sequence_number
from ..._guards import is_small
from .._filled import LEAST_BYTES, Filled, Narrowed
from .._masks import Flags, Mask
from .._recipes import Outer, Recipe, Reconsidered, Result
from .._replay import Node
from .._replay_entries import ReplayTable
from .._shared_values import SharedValue
from ..untracked._seen_calls import Remade
from ._at_edges import NotedValues, NotFollowedError, Value
from ._left import Note
from ._region import Region
from ._remade_steps import Again, heeded, noted


@dataclass(frozen=True, slots=True)
class Replayed:
    """A tensor that a recipe stands for.

    Attributes:
        value: what it is, or is a view of.
        kind: the tensor's type, dtype and device.
        device: type of the one that it is replayed on.
        is_result: whether its producer is the node that saves it.
        version: how often it was written to.
        is_first: whether no earlier step is for the same value.
        outers: which of the region's outer tensors the producer's replay reads.
        is_shown: whether calls that are made again read it, too.
    """

    value: Value
    kind: tuple[type, torch.dtype, torch.device]
    device: str
    is_result: bool
    version: int
    is_first: bool
    outers: tuple[int, ...] = ()
    is_shown: bool = False


@dataclass(frozen=True, slots=True)
class Watched:
    """A tensor that is kept, and looked at.

    Attributes:
        is_loose: whether its values are asked whether less can be kept.
        is_read: whether a replay reads it, and it is the region's caller's.
        source: which of those it is that replays read at edges; None of no such one.
        version: how often such a one was written to.
        is_own: whether it is the region's alone, and may be kept as narrower numbers.
        made: what made it, where a plan keeps it (`_planned_steps`).
    """

    is_loose: bool
    is_read: bool
    source: int | None
    version: int
    is_own: bool = False
    made: Any = None


@dataclass(frozen=True, slots=True)
class Later:
    """A tensor that is kept, and replayed when the forward has ended: its operand is kept then.

    Attributes:
        replayed: what stands for it from then on.
    """

    replayed: Replayed


Step = tuple[int, Any, Replayed | Watched | Again | Later | None]
"""The number after the node that saves it, the type of what made it, what is done.

Numbers are counted from the first of the region. None for a tensor that is kept, and no more.
"""
Steps = tuple[Step, ...]
LEAST_FOLLOWED = 8
"""So many forwards follow before one that leaves the steps counts as the first."""
END: Step = (0, None, None)
"""No tensor agrees with it."""


@dataclass(frozen=True, slots=True)
class _Line:
    number: int
    kind: Any
    version: int
    is_loose: bool
    held: Any
    tensor_kind: tuple[type, torch.dtype, torch.device]
    key: tuple[Node, int]
    is_kept: bool
    is_product: bool
    is_small: bool
    value: Value | None = None
    is_first: bool = False
    reads: tuple[Outer, ...] = ()


class RecordedRegion(Region):
    """A forward that is written down.

    Attributes:
        steps: what was done, once it has ended; None where Rule 1 has no steps.
        heeds: the functions of which calls have to be seen; None for all.
        notes: what else was known of each tensor, for who leaves the steps.
        copies_all: whether a copy can be had of all that is small and the region did not make.
    """

    copies_all = False
    steps: Steps | None = None
    heeds: frozenset[str] | None = frozenset()
    notes: tuple[Note, ...] = ()

    def __init__(self, entries: ReplayTable, given: tuple[Any, ...]) -> None:
        super().__init__(entries, given)
        self._lines: list[_Line] = []
        self._values = NotedValues(self.edges, entries, self._first, given)
        self._cells: set[SharedValue] = set()
        self._again: dict[int, Again] = {}
        self._follows = True

    def pack(self, tensor: torch.Tensor) -> Any:
        """Pack the tensor, then note what became of it."""
        node: Node = tensor.grad_fn
        version = tensor._version
        products = self.products.count
        held = super().pack(tensor)
        number = sequence_number()
        if not (self._follows and number in self._own and type(held) in _STEPS):
            self._follows = False
            return held
        size = tensor.numel() * tensor.element_size()  # `nbytes` is not for all layouts
        is_loose = node is None and not tensor.requires_grad and size >= LEAST_BYTES
        if type(held) is Remade:
            self._again[id(held)] = noted(self)
        key, kind = (node, tensor.output_nr), (type(tensor), tensor.dtype, tensor.device)
        line = number - self._first, type(node), version, is_loose, held, kind, key
        is_kept = node is not None and self.edges.kept.get(key) is held
        known = is_kept, self.products.count > products, is_small(tensor)
        try:
            made_by = self._made_by(kind[0], node, held) if isinstance(held, Recipe) else ()
        except NotFollowedError:
            self._follows = False
            return held
        self._lines.append(_Line(*line, *known, *made_by))
        self._values.saw(held)
        return held

    def _made_by(
        self, kind: type, node: Node, held: Recipe
    ) -> tuple[Value, bool, tuple[Outer, ...]]:
        """A recipe's value, whether it is the first for that, and what it protects then."""
        cell, rule = held.cell, held.entry.rule
        if cell.through and kind is not torch.Tensor:
            raise NotFollowedError
        node, _ = self._entries.past_views(node)
        value = self._values.value(node, cell)
        if cell in self._cells:
            return value, False, ()
        self._cells.add(cell)
        if cell.through:
            return value, True, ()
        read = self.outers.get(node_number(node) + 1, ())
        living = [reference() for reference in read[: len(read) - rule.results]]
        return value, True, tuple(outer for outer in living if type(outer) is Outer)

    def _span(self, *args: Any) -> Any:
        self._follows = False
        return super()._span(*args)

    def close(self) -> None:
        """Make steps of what was noted."""
        super().close()
        if self._follows and len(self.edges.inside) == 1 and self._note_late():  # itself
            self._values.count()
            read = self.edges.calls.untracked.read
            self.steps = steps = _steps(
                self._lines, self._values.sources, self._again, read, self.copies_all
            )
            if steps is not None:
                self.heeds = heeded(steps, self._values.noted)
                self.notes = tuple(map(_noted, self._lines, steps))

    def _note_late(self) -> bool:
        """Note what made what a recipe has taken the place of by now; whether that is followed."""
        for at, line in enumerate(self._lines):
            waited = line.held
            if type(waited) is not Reconsidered or not isinstance(waited.held, Recipe):
                continue
            if waited.is_result:
                return False
            try:
                made_by = self._made_by(line.tensor_kind[0], line.key[0], waited.held)
            except NotFollowedError:
                return False
            value, is_first, reads = made_by
            self._lines[at] = replace(line, value=value, is_first=is_first, reads=reads)
        return True

    def forget(self) -> None:
        """Let go of what was noted, too."""
        super().forget()
        self._lines.clear()
        self._cells.clear()
        self._again.clear()
        self._values.forget()


_KEPT = (tuple, Outer, Reconsidered, Mask, Flags, Filled, Narrowed)
_STEPS = frozenset({*_KEPT, Recipe, Result, Remade})


def _steps(
    lines: list[_Line],
    sources: dict[int, int],
    again: Mapping[int, Again],
    shown: Set[tuple[Node, int]],
    copies_all: bool,
) -> Steps | None:
    outers: dict[int, int] = {}
    read = {id(outer) for line in lines for outer in line.reads}
    if copies_all:
        read.update(id(line.held) for line in lines if type(line.held) is Outer and line.is_small)
    steps: list[Step] = []
    late: list[int] = []
    for line in lines:
        held = line.held
        if line.key in shown and not isinstance(held, Recipe):
            sources.setdefault(id(held), len(sources))
        what: Replayed | Watched | Again | Later | None = again.get(id(held))
        if what is not None:
            pass
        elif isinstance(held, Recipe):
            if held.cell.written is not None:
                return None
            what = _replayed(line, held, outers, line.key in shown)
        elif line.value is not None:
            if held.held.cell.written is not None or id(held) in sources or id(held) in read:
                return None
            late.append(len(steps))
        elif line.is_loose or id(held) in read or id(held) in sources or type(held) is Narrowed:
            source, is_own = sources.get(id(held)), type(held) is Narrowed
            is_loose = line.is_loose or is_own
            what = Watched(is_loose, id(held) in read, source, line.version, is_own)
            if id(held) in read:
                outers[id(held)] = len(outers)
        steps.append((line.number, line.kind, what))
    for at in late:  # when all is known that they read
        line = lines[at]
        replayed = _replayed(line, line.held.held, outers, line.key in shown)
        steps[at] = line.number, line.kind, Later(replayed)
    return (*steps, END)


def _noted(line: _Line, step: Step) -> Note:
    what, is_outer = step[2], type(line.held) in (Outer, Remade)
    return Note(
        number=line.number,
        version=line.version if line.is_kept else -1,
        is_product=line.is_product,
        is_outer=is_outer,
        is_small=type(line.held) is Outer and line.is_small,
        is_read=type(what) is Watched and what.is_read,
    )


def _replayed(line: _Line, recipe: Recipe, outers: dict[int, int], is_shown: bool) -> Replayed:
    assert line.value is not None
    return Replayed(
        value=line.value,
        kind=line.tensor_kind,
        device=recipe.device,
        is_result=type(recipe) is Result,
        version=line.version,
        is_first=line.is_first,
        outers=tuple(outers[id(each)] for each in line.reads),
        is_shown=is_shown,
    )


class Shape:
    """What is known of a function's forwards with inputs of some shapes.

    Attributes:
        steps: what they do; None where that is not known.
        heeds: the functions of which calls have to be seen for that; None for all.
        notes: what else is known of the tensors, for who leaves the steps.
        followed: how many followed the steps since they were written down.
        left: how many did not, one soon after the other.
        is_met: whether one was decided on without steps, under a plan.
    """

    __slots__ = ("followed", "heeds", "is_met", "left", "notes", "steps")

    def __init__(self) -> None:
        self.steps: Steps | None = None
        self.heeds: frozenset[str] | None = frozenset()
        self.notes: tuple[Note, ...] = ()
        self.is_met = False
        self.followed = self.left = 0

    def leave(self) -> None:
        """Note that a forward left the steps, or that there are none."""
        self.left = self.left + 1 if self.followed < LEAST_FOLLOWED else 1
        self.steps, self.followed = None, 0
