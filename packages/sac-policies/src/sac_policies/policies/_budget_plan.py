"""The plan that a solver returns: decisions for single calls, with what they cost.

Rule 1. `choices` are decisions for operator calls. The contexts engine and compiled code follow
        them in every function that calls these operators, whatever the shapes.
Rule 2. `packs` are the same decisions for saved tensors, in the order autograd saves them. The
        recipe engine follows them, and only a plan that was solved for it has them. What
        autograd saves depends on which inputs need a gradient, so the plan knows that as well.
Rule 3. A few values are made again by what calls were given, which has to be seen in each forward
        and costs time at every call. A plan whose budget has room for them keeps them instead.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property

from ._plans import Plan, Target, Unit

Pack = tuple[str, bool]
"""Node that made a saved tensor ("" where nothing rebuilds it), whether it is kept."""


@dataclass(frozen=True, repr=False)
class BudgetPlan(Plan):
    """The best decisions for a budget.

    Attributes:
        packs: for each tensor that autograd saves, in order, what the recipe engine does.
        kept_bytes: bytes kept between forward and backward; never above the budget.
        recompute_cost: work that backward repeats, in `unit`, and `copy_cost`.
        bound_cost: no plan within the budget repeats less; equal when the plan is optimal.
        unit: "ns" or "flops".
        engine: what it was solved for, "recipe" or "contexts"; `engine="auto"` uses that one.
        inputs: for each tensor argument of the profiled call whether it needed a gradient;
            None where it was not recorded.
        offloaded_bytes: moved to the host meanwhile; not part of `kept_bytes`.
        copy_cost: time for which a region waits for copies to the host and back, which is what no
            other work hides of them; the mean of the regions that the plan was solved for.
        strict: whether the recipe engine refuses a forward that saves other tensors than were
            profiled; else it keeps those that the plan does not know, and warns once.
        sees_calls: whether the recipe engine sees in each forward what calls are given (Rule 3).
    """

    packs: tuple[Pack, ...]
    kept_bytes: int
    recompute_cost: int
    bound_cost: int
    unit: Unit
    engine: Target = "recipe"
    inputs: tuple[bool, ...] | None = None
    offloaded_bytes: int = 0
    strict: bool = False
    sees_calls: bool = True
    copy_cost: int = 0

    @property
    def problem(self) -> str:
        """Numbers that no solver returns, or decisions that no engine can follow."""
        counts = (self.kept_bytes, self.recompute_cost, self.bound_cost)
        if min(counts) < 0 or self.bound_cost > self.recompute_cost:
            return "its bytes and costs are {}, {} and {}".format(*counts)
        if self.offloaded_bytes < 0:
            return f"it moves {self.offloaded_bytes} bytes to the host"
        if not 0 <= self.copy_cost <= self.recompute_cost:
            return f"it waits {self.copy_cost} for copies, of {self.recompute_cost} in all"
        if self.packs and self.engine != "recipe":
            return f"a plan for {self.engine!r} lists saved tensors"
        return super().problem

    @cached_property
    def digest(self) -> str:
        """Sixteen hexadecimal digits; equal on every rank that holds the same plan."""
        rows = [[name, index, choice.value] for (name, index), choice in self.choices]
        whole = [rows, self.packs, self.engine, self.inputs, self.sees_calls]
        return hashlib.sha256(json.dumps(whole).encode()).hexdigest()[:16]

    def is_for(self, inputs: tuple[bool, ...]) -> bool:
        """Whether the recipe engine can follow it where these inputs need gradients (Rule 2)."""
        return self.engine == "recipe" and self.inputs in (None, inputs)

    @property
    def gap(self) -> float:
        """Share of `recompute_cost` that a better plan could save at most; 0.0 is optimal."""
        spare = self.recompute_cost - self.bound_cost
        return spare / self.recompute_cost if spare else 0.0


@dataclass(frozen=True)
class Infeasible:
    """What a solver returns when nothing fits: falsy, and says what would fit.

    Attributes:
        budget_bytes: the budget asked for.
        smallest_bytes: the smallest budget that has a plan.
        how: what takes no more than that; "" where a plan of the solver does.
    """

    budget_bytes: int
    smallest_bytes: int
    how: str = ""

    def __bool__(self) -> bool:
        return False

    def __str__(self) -> str:
        """Say what is missing, and what would fit."""
        short = self.smallest_bytes - self.budget_bytes
        how = self.how and f" ({self.how})"
        return (
            f"nothing fits {self.budget_bytes:,} bytes: {self.smallest_bytes:,} are needed{how}, "
            f"{short:,} more. Raise the budget, divide the batch, or offload or shard what is left"
        )
