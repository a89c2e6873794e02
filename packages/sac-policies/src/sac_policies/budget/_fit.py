"""Finds the plan for one region whose measured peak fits a budget.

The peaks of solved plans are predicted from one recorded step, and the best plan that is predicted
to fit is measured. All ranks use rank 0's plans and the largest peak of any rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from .._checkpoint import checkpoint
from ..policies._budget_plan import BudgetPlan, Infeasible
from ..policies._plans import Unit
from ._agree import from_first_rank, largest
from ._limit import Limit
from ._profile import check_unit
from ._sizes import Budget
from ._solve import solve, spread
from ._step import Loss, Step, check_order, check_step
from ._step_trace import StepTrace, traced_step


@dataclass(frozen=True)
class Fit:
    """A measured plan.

    Attributes:
        policy: for `checkpoint(model, *batch, policy=...)`.
        peak_bytes: peak memory of a step with it; at most the budget.
        budget_bytes: the budget minus the reserve.
        rounds: (kept bytes, peak) of each measured plan, in order.
        predicted_bytes: its predicted peak (`profile_step`).
    """

    policy: BudgetPlan
    peak_bytes: int
    budget_bytes: int
    rounds: tuple[tuple[int, int], ...]
    predicted_bytes: int


def plan_region(
    model: nn.Module,
    batch: Any,
    budget: Budget,
    *,
    loss: Loss | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    reserve: Budget = 0,
    unit: Unit = "ns",
) -> Fit | Infeasible:
    """Find the plan with the least recomputation whose measured peak fits `budget`.

    The plan is for the whole model as one region. `fit_` divides a model into blocks, and reaches
    smaller budgets. Runs a step without checkpointing, predicts the peaks of plans from it, and
    measures the best plan that is predicted to fit. At most three plans are measured. Collective
    where a process group is initialised.

    Args:
        model: on the device it trains on, in the mode it trains in; it does not change.
        batch: a tuple of its arguments, a dict of its keyword arguments, or its one argument.
        budget: most memory that a step may take: bytes (int), "6 GiB", a fraction ("60%", 0.6) of
            what it takes without checkpointing, or "device": what is free now on the model's
            accelerator, with what the model, the batch, gradients and `optimizer` have there.
            Counts parameters, buffers, gradients, the batch and all that a forward and backward
            allocate; not the buckets that DDP keeps.
        loss: from the model's output to a scalar; by default the output's own `loss`, else the
            sum of its float tensors.
        optimizer: its state counts in the peak: what it has, and what its first step will make.
            That is known for torch's elementwise optimizers; others need to have run a step.
        reserve: how much of the budget stays free, for the allocator and other programs: bytes,
            text, or a fraction of the budget.
        unit: unit of work, see `profile`; with "flops", equal runs give equal plans.

    Returns:
        The plan and its peak, or an `Infeasible` with the smallest peak measured.

    Raises:
        BudgetError: `model` is not a module or has no data, the budget does not parse or is
            "device" on a CPU, the optimizer's state is not known, the output has no gradient, or
            ranks run different operators.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 8))
        >>> found = plan_region(model, torch.ones(32, 64), "100 KiB")
        >>> found.peak_bytes <= 100 * 1024
        True
    """
    check_step("plan_region", model, loss)
    check_order("plan_region", batch, budget)
    check_unit(unit, where="plan_region")
    limit = Limit(budget, reserve)
    step = Step("plan_region", model, batch, loss, optimizer)
    step.check_data()
    limit.settle(step)
    with step.leaving_the_model():
        step.settle_buckets()
        traced = traced_step(step, unit)
        return _Search(traced, step).run(limit)


def _steady(model: nn.Module, plan: BudgetPlan, *args: Any, **kwargs: Any) -> Any:
    """Run a forward without comparing bits, as later steps do."""
    return checkpoint(model, *args, policy=plan, determinism_check="none", **kwargs)


_POINTS, _SPREAD = 32, 16
"""Budgets that are solved for, and plans that keep every n-th value."""
_TRIES = 3
"""Plans that are measured until one fits."""
_STRIDE = 4
"""Of plans by rising work, each of so many is looked at first."""


class _Search:
    """Plans with their predicted or measured peaks."""

    def __init__(self, traced: StepTrace, step: Step) -> None:
        self._traced, self._step = traced, step
        self._trace = from_first_rank(traced.trace)
        self._rounds: list[tuple[int, int]] = []
        self._known: dict[str, int] = {}

    def run(self, limit: Limit) -> Fit | Infeasible:
        """Measure the best plan that is predicted to fit, or else the smallest."""
        plan = self._solved(self._trace.total_bytes())
        peak = self._measured(plan)
        allowed = limit.allowed(peak)
        if peak <= allowed:
            return self._found(plan, peak, allowed)
        plans, target = self._candidates(), allowed
        for _ in range(_TRIES):
            fitting = self._cheapest(plans, target)
            plan = fitting or min(plans, key=self._predicted)
            peak = self._measured(plan)
            if peak <= allowed:
                return self._found(plan, peak, allowed)
            if fitting is None:
                break
            target -= peak - allowed
        smallest = min(peak for _, peak in self._rounds)
        share = 100 * smallest / self._rounds[0][1]
        how = f"{share:.0f} % of what it takes without checkpointing, as one region; see fit_"
        return Infeasible(allowed, smallest, how)

    def _candidates(self) -> list[BudgetPlan]:
        """Yield plans in order of work.

        Fewer kept bytes may give a higher peak: a long chain of replays restores all its values at
        once. Plans that keep every n-th value have short chains.
        """
        low, high = self._trace.fixed_bytes(), self._trace.total_bytes()
        budgets = (low + (high - low) * number // _POINTS for number in range(_POINTS))
        found = [self._solved(kept) for kept in budgets]
        found += [from_first_rank(spread(self._trace, nth)) for nth in range(2, _SPREAD + 2)]
        plans = {plan.digest: plan for plan in found}.values()
        return sorted(plans, key=lambda plan: plan.recompute_cost)

    def _cheapest(self, plans: list[BudgetPlan], target: int) -> BudgetPlan | None:
        """Return the plan with least work among plans with a predicted peak of at most `target`."""
        for at in range(_STRIDE - 1, len(plans) + _STRIDE - 1, _STRIDE):
            group = plans[at - _STRIDE + 1 : at + 1]
            if self._predicted(group[-1]) <= target:
                return next(plan for plan in group if self._predicted(plan) <= target)
        return next((plan for plan in plans if self._predicted(plan) <= target), None)

    def _predicted(self, plan: BudgetPlan) -> int:
        if plan.digest not in self._known:
            self._known[plan.digest] = largest(self._traced.peak_bytes(plan))
        return self._known[plan.digest]

    def _solved(self, kept_bytes: int) -> BudgetPlan:
        plan = from_first_rank(solve(self._trace, kept_bytes))
        assert isinstance(plan, BudgetPlan), "at least the fixed bytes are kept"
        return plan

    def _measured(self, plan: BudgetPlan) -> int:
        peak = self._step.peak(partial(_steady, self._step.model, plan))
        self._rounds.append((plan.kept_bytes, peak))
        return peak

    def _found(self, plan: BudgetPlan, peak: int, allowed: int) -> Fit:
        return Fit(plan, peak, allowed, tuple(self._rounds), self._predicted(plan))
