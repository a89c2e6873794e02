"""Follows a plan of `solve`: one decision for each tensor that autograd saves.

Rule 1. Decisions are taken in the order of the plan as long as the forward saves what was
        profiled.
Rule 2. From the first other tensor on, the n-th one that a kind of node made has the decision
        that is n-th among those left for this kind. Where none is left the plan does not know the
        tensor, and it is kept: gradients are right, and more is held than was planned.
Rule 3. That is warned of once for a plan. A strict plan refuses it, in the forward.
Rule 4. Whoever goes on where steps end (`_planned_steps`) has taken as many decisions as steps.
Rule 5. What calls are given is seen where the plan was made with that, and only there, whatever
        other forwards of the function showed.
"""

from __future__ import annotations

import warnings
from collections import defaultdict, deque
from typing import Any

import torch

from ...._errors import RecomputeError, UnmatchedEntryWarning
from ...._frames import user_line, user_stacklevel
from ....policies._budget_plan import BudgetPlan
from .._replay import Node
from .._replay_entries import ReplayTable, Why, every_rule
from .._writes import Habit
from ._region import Region

_UNREPLAYED = ("", True)
_told: set[str] = set()
"""Handles of plans that were warned of."""


class Decisions:
    """Those of a plan in one forward, asked for one by one.

    Attributes:
        plan: whose they are.
        at: how many were taken in the order of the plan (Rule 1).
        unknown: how many tensors the plan does not know.
    """

    def __init__(self, plan: BudgetPlan) -> None:
        self.plan = plan
        self.at = 0
        self.unknown = 0
        self._packs = plan.packs
        self._left: dict[str, deque[bool]] | None = None
        self._saved = 0
        self._first_unknown = ""

    @property
    def are_met(self) -> bool:
        """Whether the forward that ended saved what the plan knows, and all of it."""
        return self._left is None and self.at == len(self._packs)

    @property
    def comes_unreplayed(self) -> bool:
        """Whether nothing made the next tensor again when it was profiled."""
        return self._packs[self.at : self.at + 1] == (_UNREPLAYED,)

    def skip(self, count: int) -> None:
        """Count the first tensors of a forward as decided on, as the plan says."""
        self.at = self._saved = count

    def next(self, producer: str, node: Node) -> bool | None:
        """Whether the plan keeps the next tensor; None where it does not know it (Rule 2).

        Args:
            producer: name of the node that made it; "" where nothing rebuilds it.
            node: what the tensor says made it, for messages.
        """
        self._saved += 1
        if self._left is None:
            at, self.at = self.at, self.at + 1
            planned, keeps = self._packs[at] if at < len(self._packs) else ("nothing", True)
            if planned == producer:
                return keeps
            if self.plan.strict:
                raise self._changed(f"is made by {producer or 'the caller'}", planned)
            self._left = self._by_producer(at)
            self.at = len(self._packs)
        left = self._left.get(producer)
        if left:
            return left.popleft()
        if not self.unknown:
            self._first_unknown = f"made by {type(node).__name__}, at {user_line()}"
        self.unknown += 1
        return None

    def _by_producer(self, start: int) -> dict[str, deque[bool]]:
        left: defaultdict[str, deque[bool]] = defaultdict(deque)
        for producer, keeps in self._packs[start:]:
            left[producer].append(keeps)
        return dict(left)

    def end(self) -> None:
        """Compare with the plan what the forward saved as a whole."""
        if self.plan.strict and self.at != len(self._packs):
            raise self._changed("is missing", self._packs[self.at][0])
        if self.unknown and self.plan.handle not in _told:
            _told.add(self.plan.handle)
            self._warn()

    def _warn(self) -> None:
        warnings.warn(
            f"sac_policies.checkpoint: {self.unknown} of {self._saved} tensors that autograd "
            f"saved are not in the plan ({self.plan.text}), but it was made for one function and "
            f"its inputs: they are kept beyond its budget. The first is {self._first_unknown}. "
            "Profile and solve again for what is run here, or pass strict=True to make this an "
            "error.",
            UnmatchedEntryWarning,
            stacklevel=user_stacklevel(),
        )

    def _changed(self, found: str, planned: str) -> RecomputeError:
        at = self.at - (found != "is missing")
        return RecomputeError(
            f"sac_policies.checkpoint: saved tensor {at} {found} (at {user_line()}; rule "
            f"{self.plan.text}), but the plan was made where it was {planned or 'the caller'}. "
            'Profile and solve again for this function and its inputs, or use engine="contexts", '
            "which follows the plan by operator calls; without strict=True such a tensor is kept."
        )


class DecidedByPlan(Region):
    """A forward, or the rest of one, whose saved tensors a plan decides on.

    Attributes:
        decisions: of the plan, in this forward.
    """

    decisions: Decisions
    _minds = ~Habit.NONE

    def follow_plan(self, decisions: Decisions) -> None:
        """Ask these from now on."""
        self._minds = ~Habit.NONE if decisions.plan.sees_calls else ~Habit.FORGETS
        self.mind(Habit.FORGETS)
        self.decisions = decisions

    def mind(self, habit: Habit) -> None:
        """Replay from now on only what such a region allows (Rule 5)."""
        super().mind(habit & self._minds)

    def pack(self, tensor: torch.Tensor) -> Any:
        """Return what autograd is to hold instead of the next tensor."""
        return self.decided(tensor, self.consumer())

    def decided(self, tensor: torch.Tensor, number: int) -> Any:
        """Do the same for the node before the one with this number, 0 for none."""
        node, decisions = tensor.grad_fn, self.decisions
        found = self.producer(tensor, node, self._entries[type(node)], number)
        if not isinstance(found, Why) and decisions.comes_unreplayed:
            found = Why.UNSEEN
        if isinstance(found, Why):
            decisions.next("", node)
            return self.hold(tensor, node, number, found)
        keeps = decisions.next(found[1].rule.node, node)
        if keeps:
            return self.hold(tensor, node, number, Why.PLAN)
        if keeps is None:
            return self.hold(tensor, node, number, Why.UNPLANNED)
        return self.recipe(tensor, number, found)

    def close(self) -> None:
        """Compare with the plan, too."""
        self.products.forget()  # the plan was made of what is kept at first
        super().close()
        self.decisions.end()


class PlannedRegion(DecidedByPlan):
    """A forward that a plan decides on."""

    def __init__(
        self,
        plan: BudgetPlan,
        given: tuple[Any, ...] = (),
        entries: ReplayTable = every_rule,
    ) -> None:
        super().__init__(entries, given)
        self.follow_plan(Decisions(plan))
