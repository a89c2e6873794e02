"""Follows a plan of `solve`: one decision for each tensor that autograd saves, in order."""

from __future__ import annotations

from typing import Any

import torch

from ..._errors import RecomputeError
from ..._frames import user_line
from ...policies._budget_plan import BudgetPlan
from ._region import Region
from ._replay_entries import Why, every_rule
from ._writes import Habit


class PlannedRegion(Region):
    """Follows a plan's decisions, one for each tensor that autograd saves, in order."""

    def __init__(self, plan: BudgetPlan, given: tuple[Any, ...] = ()) -> None:
        super().__init__(every_rule, given)
        self.mind(Habit.FORGETS)
        self._plan = plan
        self._packs = plan.packs
        self._at = 0

    def pack(self, tensor: torch.Tensor) -> Any:
        """Return what autograd is to hold instead of the next tensor."""
        number = self.consumer()
        node = tensor.grad_fn
        found = self.producer(tensor, node, self._entries[type(node)], number)
        if self._packs[self._at : self._at + 1] == (("", True),) and not isinstance(found, Why):
            found = Why.UNSEEN
        if isinstance(found, Why):
            self._next("")
            return self.hold(tensor, node, number, found)
        if self._next(found[1].rule.node):
            return self.hold(tensor, node, number, Why.PLAN)
        return self.recipe(tensor, number, found)

    def _next(self, producer: str) -> bool:
        at, self._at = self._at, self._at + 1
        planned, keeps = self._packs[at] if at < len(self._packs) else ("nothing", True)
        if planned != producer:
            raise self._changed(f"is made by {producer or 'the caller'}", planned or "the caller")
        return keeps

    def close(self) -> None:
        """Check that the forward saved as many tensors as the plan lists."""
        super().close()
        if self._at != len(self._packs):
            raise self._changed("is missing", self._packs[self._at][0] or "the caller")

    def _changed(self, found: str, planned: str) -> RecomputeError:
        return RecomputeError(
            f"sac_policies.checkpoint: saved tensor {self._at} {found} (at {user_line()}; rule "
            f"{self._plan.text}), but the plan was made where it was {planned}. Profile and solve "
            'again for this function and its inputs, or use engine="contexts", which follows the '
            "plan by operator calls."
        )
