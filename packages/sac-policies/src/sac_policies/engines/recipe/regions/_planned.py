"""Follows a plan of `solve`: one decision for each tensor that autograd saves.

Rule 1. Decisions are taken in the order of the plan as long as the forward saves what was
        profiled.
Rule 2. From the first other tensor on, the n-th one that a kind of node made has the decision
        that is n-th among those left for this kind. Where none is left the plan does not know the
        tensor, and it is kept: gradients are right, and more is held than was planned.
Rule 3. That is warned of once for a plan. A strict plan refuses it, in the forward.
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
from .._replay_entries import Why, every_rule, unchecked_rules
from .._writes import Habit
from ._region import Region

_UNREPLAYED = ("", True)
_told: set[str] = set()
"""Handles of plans that were warned of."""


class PlannedRegion(Region):
    """A forward whose saved tensors a plan decides on.

    Attributes:
        unknown: how many the plan does not know.
    """

    def __init__(
        self, plan: BudgetPlan, given: tuple[Any, ...] = (), compares: bool = True
    ) -> None:
        super().__init__(every_rule if compares else unchecked_rules, given)
        self.mind(Habit.FORGETS)
        self._plan = plan
        self._packs = plan.packs
        self._at = 0
        self._left: dict[str, deque[bool]] | None = None
        self.unknown = 0
        self._saved = 0
        self._first_unknown = ""

    def pack(self, tensor: torch.Tensor) -> Any:
        """Return what autograd is to hold instead of the next tensor."""
        number = self.consumer()
        node = tensor.grad_fn
        found = self.producer(tensor, node, self._entries[type(node)], number)
        if self._packs[self._at : self._at + 1] == (_UNREPLAYED,) and not isinstance(found, Why):
            found = Why.UNSEEN
        if isinstance(found, Why):
            self._next("", node)
            return self.hold(tensor, node, number, found)
        keeps = self._next(found[1].rule.node, node)
        if keeps:
            return self.hold(tensor, node, number, Why.PLAN)
        if keeps is None:
            return self.hold(tensor, node, number, Why.UNPLANNED)
        return self.recipe(tensor, number, found)

    def _next(self, producer: str, node: Node) -> bool | None:
        """Whether the plan keeps the next tensor; None where it does not know it (Rule 2)."""
        self._saved += 1
        if self._left is None:
            at, self._at = self._at, self._at + 1
            planned, keeps = self._packs[at] if at < len(self._packs) else ("nothing", True)
            if planned == producer:
                return keeps
            if self._plan.strict:
                raise self._changed(f"is made by {producer or 'the caller'}", planned)
            self._left = self._by_producer(at)
            self._at = len(self._packs)
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

    def close(self) -> None:
        """Compare with the plan what the forward saved as a whole."""
        self.products.forget()  # the plan was made of what is kept at first
        super().close()
        if self._plan.strict and self._at != len(self._packs):
            raise self._changed("is missing", self._packs[self._at][0])
        if self.unknown and self._plan.handle not in _told:
            _told.add(self._plan.handle)
            self._warn()

    def _warn(self) -> None:
        warnings.warn(
            f"sac_policies.checkpoint: {self.unknown} of {self._saved} tensors that autograd "
            f"saved are not in the plan ({self._plan.text}), but it was made for one function and "
            f"its inputs: they are kept beyond its budget. The first is {self._first_unknown}. "
            "Profile and solve again for what is run here, or pass strict=True to make this an "
            "error.",
            UnmatchedEntryWarning,
            stacklevel=user_stacklevel(),
        )

    def _changed(self, found: str, planned: str) -> RecomputeError:
        at = self._at - (found != "is missing")
        return RecomputeError(
            f"sac_policies.checkpoint: saved tensor {at} {found} (at {user_line()}; rule "
            f"{self._plan.text}), but the plan was made where it was {planned or 'the caller'}. "
            'Profile and solve again for this function and its inputs, or use engine="contexts", '
            "which follows the plan by operator calls; without strict=True such a tensor is kept."
        )
