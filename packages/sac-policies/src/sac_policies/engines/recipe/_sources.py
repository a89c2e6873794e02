"""What replays read at edges and the region keeps, or was given.

Rule 1. One node may be read by several regions: one around the checkpoint that it was made in,
        or both the region that a checkpoint runs again and its first run. What each of them keeps
        goes through other saved-tensor hooks, so each has its own cells and sources.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ..._torch_compat import sequence_number
from .._guards import copied, is_small
from ._calls import Calls, Constant
from ._formats import row_major_strides
from ._proof import storage_of
from ._replay import Node
from ._replay_entries import Decides, Why
from ._shared_values import SharedValue, Source, Unpacked
from ._writes import Habit

_numbers = itertools.count()


class Whole:
    """A row-major value, of which a view is kept that has all of its storage.

    Attributes:
        held: what is held of the view.
    """

    __slots__ = ("_read", "_shape", "held")

    def __init__(self, held: Any, read: Callable[[Any], torch.Tensor], shape: torch.Size) -> None:
        self.held, self._read, self._shape = held, read, shape

    def read(self) -> torch.Tensor:
        """Return the value, of which the view is a part."""
        kept = self._read(self.held)
        return kept.as_strided(self._shape, row_major_strides(self._shape), 0)


class Edges:
    """What a region, with those inside it, knows of values that replays can read.

    Attributes:
        habit: what the region does, or did before, that its graph does not show.
        writes_unseen: whether it has the habit of writing where autograd does not see it.
        writes_uncounted: the same, past version counters.
        copies: whether it has the habit of copying in a format that is nowhere told.
        forgets: whether its large values are rebuilt with what its graph does not hold.
        own: numbers after those of nodes that saved tensors under the region's hooks.
        cells: the same number to what the node saved as recipes; each replay reads them.
        kept: outputs that are kept, whatever decided so but a plan, by node and which one.
        planned: what a plan keeps: read where it is, and of no weight for Rule 5.
        unpacked: as `cells`, of what the node saved and hooks around the region moved away.
        calls: what nodes were given and do not know, and what a policy keeps, where that is seen.
        inside: regions that ended in it: their first numbers, those after their last, what decides.
        key: where the metadata of nodes has the cells.
        spans_returned: whether a span returned what its code is to make again.
        made: in a forward that is watched, the values that recipes are made of, by storage.
    """

    def __init__(self) -> None:
        self.own: set[int] = set()
        self.habit = Habit.NONE
        self.writes_unseen = self.writes_uncounted = self.copies = self.forgets = False
        self.cells: dict[int, list[SharedValue]] = {}
        self.kept: dict[tuple[Node, int], Any] = {}
        self.planned: dict[tuple[Node, int], Any] = {}
        self.unpacked: dict[int, list[Unpacked]] = {}
        self.calls = Calls()
        self.spans_returned = False
        self.made: WeakIdKeyDictionary | None = None
        self._ended: set[int] = set()
        self.inside: list[tuple[int, int, Decides]] = []
        # As long as more recipes may ask for them.
        self._sources: dict[tuple[Any, int], Source] = {}
        self.key = f"sac_policies {next(_numbers)}"

    def cell(self, node: Node) -> SharedValue:
        """Return what readers of a node's output share (Rule 1)."""
        metadata = node.metadata
        cell: SharedValue | None = metadata.get(self.key)
        if cell is None:
            cell = metadata[self.key] = SharedValue(key=self.key)
        return cell

    def mind(self, habit: Habit) -> None:
        """Note what the region does; asked for at every tensor, so worked out here."""
        self.habit |= habit
        self.writes_unseen = bool(self.habit & Habit.WRITES)
        self.writes_uncounted = bool(self.habit & Habit.UNCOUNTED)
        self.copies = bool(self.habit & Habit.COPIES)
        self.forgets = bool(self.habit & Habit.FORGETS)

    def ends(self, number: int) -> bool:
        """Whether the node with this number saves its result now: true once, while it is made."""
        if number + 1 != sequence_number() or number in self._ended:
            return False
        self._ended.add(number)
        return True

    def saved(self, cell: SharedValue, number: int, own_number: int) -> None:
        """Note that the node before a number saved a value that is made again.

        An in-place operator saves a copy of what it writes to, and makes that after its own node.

        Args:
            cell: what readers of the value share.
            number: that after the last node there was.
            own_number: of the node that made the value.
        """
        if number == own_number + 1:
            number = own_number
            self.own.add(number)
        self.cells.setdefault(number, []).append(cell)

    def keep(self, tensor: torch.Tensor, held: Any) -> None:
        """Note that a tensor is kept, whatever decided so but a plan."""
        self.kept[tensor.grad_fn, tensor.output_nr] = held

    def outputs(self, why: Why) -> dict[tuple[Node, int], Any]:
        """Where an output is noted that is kept for this reason, as its node made it."""
        return self.planned if why is Why.PLAN or why is Why.UNPLANNED else self.kept

    def keep_whole(self, key: tuple[Node, int], whole: Whole) -> None:
        """Note that a product is kept, of which only a view is saved."""
        self.kept.setdefault(key, whole)

    def forget(self) -> None:
        """Let go of what only the forward needs: autograd keeps the hooks as long as a graph."""
        for each in (self.own, self.cells, self.planned, self.unpacked, self.kept, self._ended):
            each.clear()
        self.calls.clear()
        self.inside.clear()
        self._sources.clear()
        self.made = None

    def note_made(self, tensor: torch.Tensor, cell: SharedValue) -> None:
        """Note in a forward that is watched that a recipe for this tensor is made."""
        if self.made is not None:
            self.made.setdefault(tensor.untyped_storage(), []).append(weakref.ref(cell))

    def wrote(self, written: list[torch.Tensor]) -> None:
        """Keep after all what was written to uncounted: the node that saved it has it as it is."""
        made = WeakIdKeyDictionary() if self.made is None else self.made
        for tensor in written:
            for reference in made.pop(tensor.untyped_storage(), ()):
                cell = reference()
                if cell is not None:
                    cell.written = storage_of(tensor)

    def leave(self, first: int, end: int, entries: Decides) -> None:
        """Note that a region inside made the nodes from `first` up to `end` (Rule 4)."""
        self.inside.append((first, end, entries))

    def is_inside(self, number: int) -> bool:
        """Whether a region inside made the node with this number."""
        return any(first <= number < end for first, end, _ in self.inside)

    def entry(self, node: Node, number: int, entries: Decides) -> Any:
        """The entry of a node, as the innermost region that made it has it."""
        if self.inside:
            for first, end, inside in self.inside:
                if first <= number < end:
                    return inside.entry(node, number)
        return entries.entry(node, number)

    def is_held(self, node: Node, output: int) -> bool:
        """Whether this output is kept."""
        return (node, output) in self.kept

    def held(self, node: Node, output: int) -> Any:
        """What is held of this output, None where it is not kept."""
        found = self.kept.get((node, output))
        return self.planned.get((node, output)) if found is None and self.planned else found

    def withdraw(self, tensor: torch.Tensor, held: Any) -> bool:
        """Note that an output is not kept after all; False where a replay reads it already."""
        key = tensor.grad_fn, tensor.output_nr
        if key in self._sources:
            return False
        if self.kept.get(key) is held:
            del self.kept[key]
        return True

    def source(
        self, node: Node, output: int, held: Any, read: Callable[[Any], torch.Tensor]
    ) -> Source:
        """Make what replays read of a kept output, or return what there is."""
        return self.source_at((node, output), lambda: Source(held, read))

    def source_at(self, key: tuple[Any, int], make: Callable[[], Source]) -> Source:
        """Return the source that is noted there, or make it."""
        source = self._sources.get(key)
        if source is None:
            source = self._sources[key] = make()
        return source


def source_of(
    constant: Constant,
    keep: Callable[[torch.Tensor, Node], Any],
    read: Callable[[Any], torch.Tensor],
    copies: bool,
) -> Source:
    """Make what replays read of an operand that its node does not know.

    Args:
        constant: as it was seen.
        keep: keeps a tensor.
        read: reads what that returned.
        copies: whether a small tensor is copied.
    """
    tensor = constant.tensor
    if tensor is None:
        return Source(constant.given, constant.read)
    kept = copied(tensor) if copies and is_small(tensor) else tensor
    made = constant.made  # alone: the constant has what a copy stands for
    return Source(keep(kept, None), read if made is None else lambda held: made(read(held)))


def living(cell: SharedValue) -> tuple[Source, ...]:
    """What is kept for the replays of a value; whoever has them has them stay."""
    if not cell.sources:
        return ()
    return tuple([source for ref in cell.sources if (source := ref()) is not None])
