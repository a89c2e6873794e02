"""The plan that a solver returns: decisions for single calls, with their cost."""

from __future__ import annotations

from dataclasses import dataclass

from ._plans import Plan, Unit


@dataclass(frozen=True, repr=False)
class BudgetPlan(Plan):
    """Decisions for a budget.

    Attributes:
        kept_bytes: bytes kept between forward and backward; at most the budget.
        recompute_cost: work that backward repeats, in `unit`.
        unit: "ns" or "flops".
    """

    kept_bytes: int
    recompute_cost: int
    unit: Unit


@dataclass(frozen=True)
class Infeasible:
    """A solver's result if nothing fits: false, with the smallest budget.

    Attributes:
        budget_bytes: the requested budget.
        smallest_bytes: the smallest budget that has a plan.
        how: levels that need `smallest_bytes`; "" for a plan of the solver.
        helps: further options, with bytes; "" if only the budget is known.
    """

    budget_bytes: int
    smallest_bytes: int
    how: str = ""
    helps: str = ""

    def __bool__(self) -> bool:
        return False

    def __str__(self) -> str:
        """Describe the missing bytes and the smallest budget."""
        short = self.smallest_bytes - self.budget_bytes
        how = self.how and f" ({self.how})"
        helps = self.helps or "divide the batch, or offload or shard what is left"
        return (
            f"nothing fits {self.budget_bytes:,} bytes: {self.smallest_bytes:,} are needed{how}, "
            f"{short:,} more. Raise the budget, or save memory: {helps}"
        )
