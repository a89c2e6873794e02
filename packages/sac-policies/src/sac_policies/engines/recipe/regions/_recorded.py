"""A forward that is written down, so that later ones need not decide it all again.

A step tells of one tensor that autograd saves: where it was asked for, and what became of it.
What is taken from a step holds in every forward, or is looked at again (`_repeated`).

Rule 1. Steps are made of a forward whose tensors are each kept, or replayed from what their own
        nodes saved. Where others' hooks, regions inside, spans, or replays through edges have a
        say, every forward decides for itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...._torch_compat import node_number, sequence_number
from .._filled import LEAST_BYTES, Filled, Narrowed
from .._masks import Mask
from .._recipes import Outer, Recipe, Reconsidered, Result
from .._replay import Node
from .._replay_entries import VIEW, ReplayEntry
from .._shared_values import SharedValue
from ._region import Region


@dataclass(frozen=True, slots=True)
class Replayed:
    """A tensor that a recipe stands for.

    Attributes:
        entry: of its producer.
        producer: number of that, counted from the first of the region.
        device: that it is replayed on.
        is_result: whether its producer is the node that saves it.
        version: how often it was written to.
        cell: which of the region's values it is.
        readers: how many that value has; 0 where an earlier step made its cell.
        outers: which of the region's outer tensors the producer's replay reads.
    """

    entry: ReplayEntry
    producer: int
    device: str
    is_result: bool
    version: int
    cell: int
    readers: int = 0
    outers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Watched:
    """A tensor that is kept, and looked at.

    Attributes:
        is_loose: whether its values are asked whether less can be kept.
        is_read: whether a replay reads it, and it is the region's caller's.
    """

    is_loose: bool
    is_read: bool


Step = tuple[int, Any, Replayed | Watched | None]
"""The number after the node that saves it, the type of what made it, what is done.

Numbers are counted from the first of the region. None for a tensor that is kept, and no more.
"""
Steps = tuple[Step, ...]
END: Step = (0, None, None)
"""No tensor agrees with it."""


@dataclass(frozen=True, slots=True)
class _Line:
    number: int
    kind: Any
    version: int
    is_loose: bool
    held: Any
    producer: int = 0
    reads: tuple[Outer, ...] = ()


class RecordedRegion(Region):
    """A forward that is written down.

    Attributes:
        steps: what was done, once it has ended; None where Rule 1 has no steps.
    """

    steps: Steps | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lines: list[_Line] = []
        self._cells: set[SharedValue] = set()
        self._follows = True

    def pack(self, tensor: torch.Tensor) -> Any:
        """Pack the tensor, then note what became of it."""
        node: Node = tensor.grad_fn
        version = tensor._version
        held = super().pack(tensor)
        number = sequence_number()
        if not (self._follows and number in self._own and type(held) in _STEPS):
            self._follows = False
            return held
        is_loose = node is None and not tensor.requires_grad and tensor.nbytes >= LEAST_BYTES
        line = number - self._first, type(node), version, is_loose, held
        made_by = self._made_by(node, held) if isinstance(held, Recipe) else ()
        self._lines.append(_Line(*line, *made_by))
        return held

    def _made_by(self, node: Node, held: Recipe) -> tuple[int, tuple[Outer, ...]]:
        """Number of a recipe's producer, and what the first recipe for its value protects."""
        cell, rule = held.cell, held.entry.rule
        while self._entries[type(node)] is VIEW:
            node = node.next_functions[0][0]
        number = node_number(node)
        if cell in self._cells:
            return number - self._first, ()
        self._cells.add(cell)
        read = self.outers.get(number + 1, ())
        living = [reference() for reference in read[: len(read) - rule.results]]
        return number - self._first, tuple(outer for outer in living if outer is not None)

    def _span(self, *args: Any) -> Any:
        self._follows = False
        return super()._span(*args)

    def close(self) -> None:
        """Make steps of what was noted."""
        super().close()
        if self._follows and len(self.edges.inside) == 1:  # itself
            self.steps = _steps(self._lines)
        self._lines.clear()
        self._cells.clear()


_KEPT = (tuple, Outer, Reconsidered, Mask, Filled, Narrowed)
_STEPS = frozenset({*_KEPT, Recipe, Result})


def _steps(lines: list[_Line]) -> Steps | None:
    cells: dict[SharedValue, int] = {}
    outers: dict[int, int] = {}
    read = {id(outer) for line in lines for outer in line.reads}
    steps: list[Step] = []
    for line in lines:
        held = line.held
        what: Replayed | Watched | None = None
        if isinstance(held, Recipe):
            if held.cell.through or held.cell.written is not None:
                return None
            what = _replayed(line, cells, outers)
        elif type(held) is Reconsidered and isinstance(held.held, Recipe):
            return None
        elif line.is_loose or id(held) in read:
            what = Watched(line.is_loose, id(held) in read)
            if id(held) in read:
                outers[id(held)] = len(outers)
        steps.append((line.number, line.kind, what))
    return (*steps, END)


def _replayed(line: _Line, cells: dict[SharedValue, int], outers: dict[int, int]) -> Replayed:
    held = line.held
    cell: SharedValue = held.cell
    is_new = cell not in cells
    return Replayed(
        entry=held.entry,
        producer=line.producer,
        device=held.device,
        is_result=type(held) is Result,
        version=line.version,
        cell=cells.setdefault(cell, len(cells)),
        readers=cell.readers if is_new else 0,
        outers=tuple(outers[id(each)] for each in line.reads),
    )
