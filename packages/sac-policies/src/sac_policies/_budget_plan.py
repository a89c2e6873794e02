"""Pure: the plan that a solver returns: decisions for single calls, with what they cost."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property

from ._plans import Plan

Pack = tuple[str, bool]
"""Node that made a saved tensor ("" where nothing rebuilds it), whether it is kept."""


@dataclass(frozen=True, repr=False)
class BudgetPlan(Plan):
    """The best decisions for a budget, for every engine.

    Attributes:
        packs: for each tensor that autograd saves, in order, what the recipe engine does.
        kept_bytes: bytes kept between forward and backward; never above the budget.
        recompute_cost: work that backward repeats, in `unit`.
        bound_cost: no plan within the budget repeats less; equal when the plan is optimal.
        unit: "ns" or "flops".
    """

    packs: tuple[Pack, ...]
    kept_bytes: int
    recompute_cost: int
    bound_cost: int
    unit: str

    @cached_property
    def digest(self) -> str:
        """Sixteen hexadecimal digits; equal on every rank that holds the same plan."""
        rows = [[name, index, choice.value] for (name, index), choice in self.choices]
        return hashlib.sha256(json.dumps([rows, self.packs]).encode()).hexdigest()[:16]

    @property
    def gap(self) -> float:
        """Share of `recompute_cost` that a better plan could save at most; 0.0 is optimal."""
        spare = self.recompute_cost - self.bound_cost
        return spare / self.recompute_cost if spare else 0.0


@dataclass(frozen=True)
class Infeasible:
    """What a solver returns when nothing fits: false, and says what would.

    Attributes:
        budget_bytes: the budget asked for.
        smallest_bytes: the smallest budget that has a plan.
    """

    budget_bytes: int
    smallest_bytes: int

    def __bool__(self) -> bool:
        return False
