"""The bytes that a step may take: a budget, what the model's device has free, less a reserve."""

from __future__ import annotations

from ._sizes import Budget, budget_bytes
from ._step import Step


class Limit:
    """A budget and its reserve, checked before anything runs.

    Args:
        budget: bytes, a share of what a step takes without checkpointing, text, or "device".
        reserve: how much of it stays free: bytes, text, or a share of the budget.

    Raises:
        BudgetError: one of them is no size.
    """

    def __init__(self, budget: Budget, reserve: Budget) -> None:
        self._budget, self._reserve = budget, reserve
        self._is_device = isinstance(budget, str) and budget == "device"
        for each, what in ((0 if self._is_device else budget, "budget"), (reserve, "reserve")):
            budget_bytes(each, total_bytes=0, what=what)

    def settle(self, step: Step) -> None:
        """Read what the device has free, before the step runs. Collective.

        Raises:
            BudgetError: the budget is "device" on a device that does not tell what is free.
        """
        if self._is_device:
            self._budget = step.available()

    def allowed(self, plain_bytes: int) -> int:
        """Bytes that are left of the budget, where a step takes so many without checkpointing."""
        whole = budget_bytes(self._budget, total_bytes=plain_bytes)
        return max(0, whole - budget_bytes(self._reserve, total_bytes=whole, what="reserve"))
