"""The bytes that a step may take: a budget, or the device's free memory, minus a reserve."""

from __future__ import annotations

from ._sizes import Budget, budget_bytes
from ._step import Step


class Limit:
    """A budget and its reserve, checked before anything runs.

    Args:
        budget: bytes, a share of the peak without checkpointing, text, or "device".
        reserve: part that stays free: bytes, text, or a share of the budget.

    Raises:
        BudgetError: one of them is not a size.
    """

    def __init__(self, budget: Budget, reserve: Budget) -> None:
        self._budget, self._reserve = budget, reserve
        self._is_device = isinstance(budget, str) and budget == "device"
        for each, what in ((0 if self._is_device else budget, "budget"), (reserve, "reserve")):
            budget_bytes(each, total_bytes=0, what=what)

    def settle(self, step: Step) -> None:
        """Read the device's free memory, before the step runs. Collective.

        Raises:
            BudgetError: the budget is "device" on a device that does not report its free memory.
        """
        if self._is_device:
            self._budget = step.available()

    def allowed(self, plain_bytes: int) -> int:
        """Return the allowed bytes, given the peak without checkpointing."""
        whole = budget_bytes(self._budget, total_bytes=plain_bytes)
        return max(0, whole - budget_bytes(self._reserve, total_bytes=whole, what="reserve"))
