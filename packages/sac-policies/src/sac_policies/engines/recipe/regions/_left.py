"""What a forward that follows steps knows, for the rest of it when it leaves them.

A region that decides notes what nodes saved, what is kept and who reads what, as it goes. Who
follows steps looks at none of it, but has it all in hand: what autograd holds, and the steps.

Rule 1. The rest decides as if nobody had followed: what was made before it is the region's, what
        is kept of that can be read, and each value knows its readers.
Rule 2. A value counts as kept where it did in the forward that was written down, and was written
        to as often as there. What a replay would read later than it was, for want of a copy, is
        not read.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ...._torch_compat import node_number
from .._calls import Calls
from .._own_rules import known_rule
from .._recipes import Found, Outer, Recipe, Result
from .._replay import Node
from .._replay_entries import ReplayTable, Why
from .._shared_values import SharedValue, Source
from .._writes import Habit
from ._followed import FollowedValues
from ._region import Region


@dataclass(frozen=True, slots=True)
class Note:
    """What a region that decided knew of a tensor that it held, besides its step.

    Attributes:
        number: that after the node that saves it, counted from the first of the region.
        version: how often a tensor was written to that replays can read; -1 for all others.
        is_product: whether the policy keeps it.
        is_outer: whether the region did not make it.
        is_small: whether a copy of such a one is what replays read.
        is_read: whether its step has such a copy made.
        is_planned: whether a plan keeps it.
        written: how often it was written to, whatever it is.
    """

    number: int
    version: int
    is_product: bool
    is_outer: bool
    is_small: bool
    is_read: bool
    is_planned: bool = False
    written: int = 0


Held = tuple[Node, int, Any]
"""What made a tensor, which of its outputs it is, and what autograd holds of it."""


class _Other:
    """Stands for what nobody can copy any more."""

    def protect(self) -> None:
        """Do nothing: it is too late."""


_AS_IT_IS: Any = _Other()
"""What replays read as it is then."""
_UNCOPIED: Any = _Other()
"""What they read as it was, from a copy."""


class Rest(Region):
    """The rest of a forward.

    Args:
        entries: what nodes are replayed, and how.
        given: what the region was given.
        values: what the forward looked at.
        habits: what earlier forwards did.
    """

    def __init__(
        self, entries: ReplayTable, given: Any, values: FollowedValues, habits: Habit
    ) -> None:
        super().__init__(entries, given, is_outermost=True, first=values.first)
        self.mind(habits)
        self._values = values
        calls: Calls | None = values.calls
        if calls is not None:
            self.edges.calls = calls

    def decided(self, tensor: torch.Tensor, number: int) -> Any:
        """Return what autograd is to hold of a tensor that the node before this number saves."""
        return self.packed(tensor, number)

    def recipe(self, tensor: torch.Tensor, number: int, found: Found) -> Any:
        """Make the recipe for a tensor, unless it lacks a copy of what it reads (Rule 2)."""
        read = self.outers.get(found[-1] + 1, ())
        cell = self.edges.cell(found[0])
        if read and not (cell.protected or cell.distance):
            copied = read[: len(read) - found[1].rule.results]
            if any(reference() is _UNCOPIED for reference in copied):
                return self.hold(tensor, tensor.grad_fn, number, Why.OTHER_HOOKS)
        return super().recipe(tensor, number, found)

    def take(self, notes: Iterable[Note], held: Iterable[Held], outers: list[Outer | None]) -> None:
        """Know what was done so far.

        Args:
            notes: of each tensor that was saved so far.
            held: what became of it.
            outers: what copies can be made of, in order; None where less is kept.
        """
        values, edges, first = self._values, self.edges, self._values.first
        recipes: list[Recipe] = []
        copies = iter(outers)
        for note, (node, output, it) in zip(notes, held, strict=False):
            number = first + note.number
            self.note(number)
            if note.is_outer:
                outer = next(copies) if note.is_read else None
                other = _UNCOPIED if note.is_small and not note.is_read else _AS_IT_IS
                known = self.outers.setdefault(number, [])
                known.append(weakref.ref(other if outer is None else outer))
            if isinstance(it, Recipe):
                recipes.append(it)
                if type(it) is not Result:
                    edges.saved(it.cell, number, node_number(it.node))
            elif node is not None and _version(it) == note.version:
                self._keep(node, output, it, note)
        for number, cells in values.shortened.items():
            edges.cells.setdefault(first + number, []).extend(cells)
        for node, output, source in values.sources():
            if (node, output) not in edges.planned:
                edges.kept.setdefault((node, output), source.held)
            edges.source_at((node, output), partial(_itself, source))
        self._count(recipes)

    def _keep(self, node: Node, output: int, held: Any, note: Note) -> None:
        edges = self.edges
        (edges.planned if note.is_planned else edges.kept)[node, output] = held
        if note.is_product:
            tensor = held[0] if type(held) is tuple else held.held[0]
            node, output = self._entries.past_views(node, output)
            self.products.keep(tensor, held, node, output)

    def _count(self, recipes: list[Recipe]) -> None:
        """Count the readers of each value so far, as `Region.recipe` does."""
        made = {cell: node for node, cell, _ in self._values.found.values()}
        for cell in made:
            cell.readers, cell.registered = 0, False
        for cells in self._values.shortened.values():
            for cell in cells:
                cell.readers = 1
        for recipe in recipes:
            recipe.cell.readers += 1
            self._register(made[recipe.cell], recipe.cell, made)
        for cell in self._values.again:
            cell.readers += 1

    def _register(self, node: Node, cell: SharedValue, made: dict[SharedValue, Node]) -> None:
        """Count the readings of a value's replay, and know the value from now on."""
        if cell.registered:
            return
        key = self.edges.key
        cell.registered, cell.key = True, key
        node.metadata[key] = cell
        if known_rule(type(node)).operands is not None:
            for each in self.edges.cells.get(node_number(node) + 1, ()):
                each.readers += 1
        farthest = -1
        for operand in cell.operands or ():
            base = None if type(operand) is str else operand[0]
            if type(base) is tuple:
                maker, other = base
                self._register(maker, other, made)
                other.readers += 1
                farthest = max(farthest, other.distance)
            else:
                farthest = max(farthest, 0)
        cell.distance = farthest + 1 if cell.through else 0


def _itself(source: Source) -> Source:
    return source


def _version(held: Any) -> int:
    """How often a kept tensor was written to when it was saved."""
    kept = held.held if type(held) is Outer else held
    return kept[1] if type(kept) is tuple else -2
