"""Forwards under a plan of `solve` that do what those before them did.

Rule 1. Steps are made of a forward that saved what the plan knows, and all of it, in its order. The
        n-th step is then the n-th decision of the plan.
Rule 2. Who leaves the steps goes on with the plan from that very tensor on, and decides all that
        is left as if nobody had followed: it knows what calls were given (all are seen, or none
        where the plan does without), how far values are from what can be read, and has a copy of
        what is small.
Rule 3. Of what the plan keeps it is looked at, too, whether it still could be made again
        (`_behind`): the plan knows it by what made it. What could not be is kept anyway.
Rule 4. What is known of a plan lives as long as the plan does. It is known by itself: it is long to
        hash.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...._torch_compat import node_number
from ....policies._budget_plan import BudgetPlan
from .._recipes import Outer, Reader, Recipe, keep
from .._replay import Node
from .._replay_entries import VIEW, ReplayEntry, ReplayTable, Why, every_rule
from .._writes import Habit
from ._behind import Behind, Looked, note_behind
from ._left import Held, Note, Rest
from ._planned import DecidedByPlan, Decisions, PlannedRegion
from ._recorded import RecordedRegion, Shape, Step, Watched
from ._region import Region
from ._repeated import Repeated
from ._repeats import Repeats


@dataclass(frozen=True, slots=True)
class Made:
    """What made a tensor that the plan keeps, past its views.

    Attributes:
        entry: of the node.
        number: of that, counted from the first of the region.
        version: how often the tensor was written to.
        kind: the tensor's type, dtype and device.
        behind: the nodes of the region that are looked at, by number.
    """

    entry: ReplayEntry
    number: int
    version: int
    kind: tuple[type, torch.dtype, torch.device]
    behind: dict[int, Behind]


@dataclass(frozen=True, slots=True)
class _Facts:
    """What is known of a tensor besides its line."""

    made: Made | None
    is_planned: bool
    version: int


class RecordedPlan(RecordedRegion, DecidedByPlan):
    """A forward under a plan that is written down."""

    copies_all = True

    def __init__(
        self,
        plan: BudgetPlan,
        given: tuple[Any, ...],
        entries: ReplayTable = every_rule,
    ) -> None:
        super().__init__(entries, given)
        self.follow_plan(Decisions(plan))
        self._facts: list[_Facts] = []
        self._behind: dict[int, Behind] = {}
        self._made: Made | None = None

    def hold(self, tensor: torch.Tensor, node: Node, number: int, why: Why) -> Any:
        """Keep a tensor; note what made it where the plan does."""
        if why is Why.PLAN:
            base = self._base[0]
            note_behind(self._behind, base, self._first, self._makers, self._entries)
            self._made = Made(
                entry=self._entries[type(base)],
                number=node_number(base) - self._first,
                version=tensor._version,
                kind=(type(tensor), tensor.dtype, tensor.device),
                behind=self._behind,
            )
        return super().hold(tensor, node, number, why)

    def pack(self, tensor: torch.Tensor) -> Any:
        """Pack the tensor, then note what became of it."""
        self._made, version = None, tensor._version
        held = super().pack(tensor)
        if self._follows:
            edges, node = self.edges, tensor.grad_fn
            is_planned = edges.planned.get((node, tensor.output_nr)) is held
            self._facts.append(_Facts(self._made, is_planned, version))
        return held

    def close(self) -> None:
        """Make steps of what was noted, and of what the plan decided (Rule 1)."""
        super().close()
        if self.steps is None or not self.decisions.are_met:
            self.steps = None
            return
        self.heeds = None
        self.steps = (*map(_step, self.steps, self._facts), *self.steps[len(self._facts) :])
        self.notes = tuple(map(_note, self.notes, self._facts))

    def forget(self) -> None:
        """Let go of what was noted, too."""
        super().forget()
        self._facts.clear()


def _step(step: Step, facts: _Facts) -> Step:
    number, kind, what = step
    if facts.made is None:
        return step
    seen = what if isinstance(what, Watched) else Watched(False, False, None, facts.version)
    return number, kind, replace(seen, made=facts.made)


def _note(note: Note, facts: _Facts) -> Note:
    version = facts.version if facts.is_planned else note.version
    return replace(
        note,
        version=version,
        is_planned=facts.is_planned,
        written=facts.version,
    )


class PlannedRest(DecidedByPlan, Rest):
    """The rest of a forward that left its steps."""

    def take(self, notes: Iterable[Note], held: Iterable[Held], outers: list[Outer | None]) -> None:
        """Know what was done so far, and how far values are from what can be read (Rule 2)."""
        notes, held = tuple(notes), tuple(held)
        super().take(notes, held, outers)
        edges, first = self.edges, self._values.first
        made = {cell: node for node, cell, _ in self._values.found.values()}
        for cell in made:
            if cell.through:  # what it reads lies no nearer where the plan keeps it: ask the graph
                cell.distance = None
        for note, (node, _, it) in zip(notes, held, strict=True):
            is_recipe = isinstance(it, Recipe)
            base = made[it.cell] if is_recipe else node
            if base is None:
                continue
            base, _ = self._entries.past_views(base)
            if node_number(base) + 1 == first + note.number:  # its result, as it made it
                (it.cell if is_recipe else edges.cell(base)).version = note.written


class RepeatedPlan(Repeated):
    """One forward under a plan that follows steps."""

    __slots__ = ("_looked", "_plan")

    def __init__(
        self,
        plan: BudgetPlan,
        shape: Shape,
        entries: ReplayTable,
        read: Reader,
        habits: Habit,
        given: Any,
    ) -> None:
        super().__init__(shape, entries, read, habits, given)
        self._plan, self._sees = plan, plan.sees_calls
        self._looked: Looked | None = None

    def _watched(self, tensor: torch.Tensor, node: Node, number: int, what: Watched) -> Any:
        made = what.made
        if made is None:
            return super()._watched(tensor, node, number, what)
        if not self._is_made(tensor, node, made):
            return None
        if what.source is None and not what.is_read:
            return keep(tensor, node)
        return super()._watched(tensor, node, number, what)

    def _is_made(self, tensor: torch.Tensor, node: Node, made: Made) -> bool:
        """Whether what the plan keeps could be made again, as when it was written down (Rule 3)."""
        entries, values = self._entries, self._values
        output = tensor.output_nr
        while entries[type(node)] is VIEW:  # as `past_views` does: most of what a plan keeps
            node, output = node.next_functions[0]
        makers, looked = values.makers, self._looked
        if makers is None:
            makers = values.list_makers()
        if looked is None:
            looked = self._looked = Looked(made.behind, self._first)
        return (
            entries[type(node)] is made.entry
            and output == 0
            and node_number(node) - self._first == made.number
            and tensor._version == made.version
            and (type(tensor), tensor.dtype, tensor.device) == made.kind
            and node not in makers
            and looked.agrees(node, made.number, makers)
        )

    def _begin(self) -> Rest:
        """Make what goes on with the plan from here on (Rule 2)."""
        rest = PlannedRest(self._entries, self._given, self._values, self._habits)
        decisions = Decisions(self._plan)
        decisions.skip(len(self._held))
        rest.follow_plan(decisions)
        return rest

    def _close(self) -> None:
        """End a forward that left its steps, or saved less: the plan may refuse that."""
        self.region.close()

    def run(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any, bool]:
        """Call the region's function under its hooks; return also whether it took every step."""
        try:
            return super().run(function, args, kwargs)
        finally:
            self._looked = None  # of the graph, which holds this


class PlannedRepeats(Repeats):
    """Forwards of functions under one plan.

    Args:
        plan: that decides, held weakly (Rule 4).
        entries: every rule.
    """

    def __init__(self, plan: BudgetPlan, entries: ReplayTable) -> None:
        super().__init__(entries)
        self._reference = weakref.ref(plan)

    @property
    def _plan(self) -> BudgetPlan:
        plan = self._reference()
        assert plan is not None  # whoever runs a forward has it
        return plan

    def _follower(self, shape: Shape, habits: Habit, given: Any) -> Repeated:
        return RepeatedPlan(self._plan, shape, self._entries, self._read, habits, given)

    def _recorder(self, given: Any) -> RecordedRegion:
        return RecordedPlan(self._plan, given, self._entries)

    def _decider(self, given: Any) -> Region:
        return PlannedRegion(self._plan, given, self._entries)

    def _shape(self, subject: object, habits: Habit, args: tuple[Any, ...]) -> Shape | None:
        """What is known of such forwards; nothing in the first, which may be the only one."""
        shape = super()._shape(subject, habits, args)
        if shape is None or shape.is_met:
            return shape
        shape.is_met = True
        return None


_known: dict[tuple[int, ReplayTable], tuple[weakref.ref[BudgetPlan], PlannedRepeats]] = {}


def repeats_of(plan: BudgetPlan, entries: ReplayTable) -> PlannedRepeats:
    """What is known of forwards under a plan, with these rules (Rule 4)."""
    key = id(plan), entries
    found = _known.get(key)
    if found is None:
        gone = weakref.ref(plan, lambda _: _known.pop(key, None) and None)
        found = _known[key] = gone, PlannedRepeats(plan, entries)
    return found[1]
