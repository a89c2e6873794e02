"""Plan one function: a value is kept, or its operator runs again."""

from __future__ import annotations

from dataclasses import dataclass

from .._errors import BudgetError, shown
from ..policies._decisions import Decision
from ..policies._plans import Plan, Unit
from ._choose import Option, cheapest
from ._sizes import Budget, budget_bytes
from ._trace import Trace


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
        cause: why blocks save little, such as other checkpointing; "" if nothing is known.
    """

    budget_bytes: int
    smallest_bytes: int
    how: str = ""
    helps: str = ""
    cause: str = ""

    def __bool__(self) -> bool:
        return False

    def __str__(self) -> str:
        """Describe the missing bytes and the smallest budget."""
        short = self.smallest_bytes - self.budget_bytes
        how = self.how and f" ({self.how})"
        helps = self.helps or "divide the batch, or offload or shard what is left"
        cause = self.cause and f" {self.cause}."
        return (
            f"nothing fits {self.budget_bytes:,} bytes: {self.smallest_bytes:,} are needed{how}, "
            f"{short:,} more.{cause} Raise the budget, or save memory: {helps}"
        )


def solve(trace: Trace, budget: Budget) -> BudgetPlan | Infeasible:
    """Plan which values to keep so that backward recomputes as little as possible within `budget`.

    The budget is for bytes kept between forward and backward, counted exactly; use `fit_` for a
    budget on the measured peak of a whole step. The plan is the best one, or close to it if there
    are very many values.

    Args:
        trace: from `profile`.
        budget: bytes (int), a fraction of the bytes that can be kept (float), "6 GiB" or "50%".

    Returns:
        A policy for `checkpoint`, or an `Infeasible` with the smallest possible budget.

    Raises:
        BudgetError: the budget is negative, above 100%, or invalid.

    Example:
        >>> solve(Trace("ns", (), ()), "1 KiB").kept_bytes
        0
    """
    if not isinstance(trace, Trace):
        raise BudgetError(
            f"sac_policies.solve: trace {shown(trace)} is a {type(trace).__name__}, but a plan "
            "is made from a Trace. Pass what profile(function, *args) returns."
        )
    allowed = budget_bytes(budget, total_bytes=trace.total_bytes())
    fixed, items = trace.fixed_bytes(), list(trace.items())
    if allowed < fixed:
        return Infeasible(allowed, fixed, "what cannot be made again, and report names")
    # The most work per byte first: then few of the states in between are worth following.
    items.sort(key=lambda item: (-item.cost / max(1, item.kept_bytes), -item.kept_bytes))
    if trace.total_bytes() <= allowed:
        kept = items  # values that several are recomputed from are then not held
    else:
        parts = [
            (Option(each.kept_bytes, 0, allowed - each.kept_bytes), Option(0, each.cost, allowed))
            for each in items
        ]
        chosen = cheapest(parts, start=fixed, limit=allowed)
        kept = [] if chosen is None else [items[at] for at, n in enumerate(chosen) if n == 0]
    saved = {item.op for item in kept}
    return BudgetPlan(
        choices=tuple(sorted((trace.ops[op].key, Decision.SAVE) for op in saved)),
        kept_bytes=trace.bytes_kept(saved),
        recompute_cost=sum(item.cost for item in items) - sum(item.cost for item in kept),
        unit=trace.unit,
    )
