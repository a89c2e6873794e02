"""Runs training steps; finds the plan whose measured peak fits a budget.

Rule 1. A plan is accepted only after a step under it was measured within the budget.
Rule 2. The model is left as it was: gradients, buffers and random state are put back.
Rule 3. All ranks decide from the same numbers (rank 0's plans, the largest peak), so they run
        the same steps and return the same plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from .._checkpoint import checkpoint
from .._errors import BudgetError, shown
from ..policies._budget_plan import BudgetPlan, Infeasible
from ..policies._checked import is_count
from ..policies._plans import Unit
from ._agree import from_first_rank, largest, largest_each
from ._sizes import Budget, budget_bytes
from ._solve import solve, spread
from ._step import Loss, Step, check_step
from .predicting._step_trace import StepTrace
from .predicting._watched_step import watched_step


@dataclass(frozen=True)
class Fit:
    """A plan that was measured.

    Attributes:
        policy: for `checkpoint(model, *batch, policy=...)`.
        peak_bytes: most memory in use during a step under it; at most the budget.
        budget_bytes: the budget.
        rounds: (bytes kept, peak) of each plan that was measured, in order.
        predicted_bytes: the peak that was predicted for it (`profile_step`).
    """

    policy: BudgetPlan
    peak_bytes: int
    budget_bytes: int
    rounds: tuple[tuple[int, int], ...]
    predicted_bytes: int


def fit(
    model: nn.Module,
    batch: Any,
    budget: Budget,
    *,
    loss: Loss | None = None,
    rounds: int = 16,
    unit: Unit = "ns",
) -> Fit | Infeasible:
    """Find the plan that repeats the least work while a step's measured peak fits `budget`.

    Runs a step without checkpointing and predicts from it what others take, solves for the best
    plan that is to fit, and confirms it by a measured step, or a second one. Only where neither
    fits is a plan searched for by measuring alone.
    The peak counts parameters, buffers, gradients, the batch and all that a forward and
    backward allocate; not optimiser state, nor the buckets that DDP keeps. Collective where a
    process group is initialised.

    Args:
        model: on the device it trains on, in the mode it trains in; left as it was.
        batch: a tuple of its arguments, a dict of its keyword arguments, or its one argument.
        budget: bytes (int), "6 GiB", or a fraction of the peak without checkpointing.
        loss: from the model's output to a scalar; by default the output's own `loss`, else the
            sum of its float tensors.
        rounds: where predictions are off, plans between keeping all and keeping least to try
            until one fits, and as many that keep every n-th value where none does; at least 1.
        unit: what work is measured in, see `profile`; with "flops" equal runs give equal plans.

    Returns:
        The plan and its peak, or an `Infeasible` with the smallest peak measured.

    Raises:
        BudgetError: `model` is not a module or has no data, `rounds` is below 1, the budget does
            not parse, the output has no gradient, or ranks run different operators.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 8))
        >>> found = fit(model, torch.ones(32, 64), "100 KiB")
        >>> found.peak_bytes <= 100 * 1024
        True
    """
    check_step("fit", model, loss)
    _check_rounds(rounds)
    budget_bytes(budget, total_bytes=0)  # refused before anything runs
    step = Step("fit", model, batch, loss)
    step.check_data()
    with step.leaving_the_model():
        step.settle_buckets()
        watched = watched_step(step, step.trace(unit))
        return _Search(watched, step).run(budget, rounds)


def _check_rounds(rounds: object) -> None:
    if not (is_count(rounds) and rounds != 0):
        raise BudgetError(
            f"sac_policies.fit: rounds {shown(rounds)} leaves nothing to try, but a plan is found "
            "by measuring. Use at least 1."
        )


def _steady(model: nn.Module, plan: BudgetPlan, *args: Any, **kwargs: Any) -> Any:
    """Run a forward as later ones run, which compare no bits."""
    return checkpoint(model, *args, policy=plan, determinism_check="none", **kwargs)


_POINTS, _SPREAD = 64, 16
"""Budgets that are solved for, and plans that keep every n-th value."""
_CONFIRMED = 2
"""Plans that are measured because they are predicted to fit."""
_FAR = 1.1
"""Share of the budget above which the smallest prediction is not doubted."""


class _Search:
    """Plans measured so far, between one that fits and one that does not."""

    def __init__(self, watched: StepTrace, step: Step) -> None:
        self._watched, self._step = watched, step
        self._trace = from_first_rank(watched.trace)
        self._rounds: list[tuple[int, int]] = []
        self._peaks: dict[str, int] = {}

    def run(self, budget: Budget, rounds: int) -> Fit | Infeasible:
        """Confirm what is predicted, or search (Rule 1)."""
        plan, peak = self._measure(self._trace.total_bytes())
        allowed = budget_bytes(budget, total_bytes=peak)
        if peak <= allowed:
            return self._found(plan, peak, allowed)
        plans = self._predicted()
        least = min(predicted for _, predicted in plans)
        target = max(allowed, least)
        for _ in range(_CONFIRMED):
            fitting = [plan for plan, predicted in plans if predicted <= target]
            if not fitting:
                break
            plan, peak = self._measured(min(fitting, key=lambda plan: plan.recompute_cost))
            if peak <= allowed:
                return self._found(plan, peak, allowed)
            target -= peak - allowed
        if least > _FAR * allowed:
            return self._infeasible(allowed)
        return self._searched(allowed, rounds)

    def _predicted(self) -> list[tuple[BudgetPlan, int]]:
        """Plans of which one is chosen, and what a step takes under each."""
        low, high = self._trace.fixed_bytes(), self._trace.total_bytes()
        budgets = (low + (high - low) * number // _POINTS for number in range(_POINTS))
        found = [solve(self._trace, kept) for kept in budgets]
        found += [spread(self._trace, nth) for nth in range(2, _SPREAD + 2)]
        plans = list({plan.digest: plan for plan in found if isinstance(plan, BudgetPlan)}.values())
        peaks = largest_each([self._watched.peak_bytes(plan) for plan in plans])
        return list(zip(plans, peaks, strict=True))

    def _searched(self, allowed: int, rounds: int) -> Fit | Infeasible:
        """Keep less and less until a step fits, then as much more as still fits.

        The peak need not fall with the bytes kept: a long chain of replays brings back at once
        all that it passes. So the first plan that fits is looked for from above. Where none
        does, plans that keep every n-th value are tried, which have short chains whatever the
        work was measured to be: what they fit into is never infeasible.
        """
        low, high = self._trace.fixed_bytes(), self._trace.total_bytes()
        fits, over = low, high
        for number in range(rounds + 1):
            kept = high - (high - low) * number // rounds
            plan, peak = self._measure(kept)
            if peak <= allowed:
                fits = kept
                break
            over = kept
        else:
            return self._spread(allowed, rounds)
        while over - fits > (high - low) // 64 + 1:
            middle = (fits + over) // 2
            fuller, measured = self._measure(middle)
            if measured <= allowed:
                plan, peak, fits = fuller, measured, middle
            else:
                over = middle
        return self._found(plan, peak, allowed)

    def _spread(self, allowed: int, rounds: int) -> Fit | Infeasible:
        """Try plans that keep every n-th value, more values first."""
        for nth in range(2, rounds + 2):
            plan, peak = self._measured(spread(self._trace, nth))
            if peak <= allowed:
                return self._found(plan, peak, allowed)
        return self._infeasible(allowed)

    def _infeasible(self, allowed: int) -> Infeasible:
        smallest = min(peak for _, peak in self._rounds)
        share = 100 * smallest / self._rounds[0][1]
        how = f"{share:.0f} % of what it takes without checkpointing, as one region; see fit_"
        return Infeasible(allowed, smallest, how)

    def _found(self, plan: BudgetPlan, peak: int, allowed: int) -> Fit:
        predicted = largest(self._watched.peak_bytes(plan))
        return Fit(plan, peak, allowed, tuple(self._rounds), predicted)

    def _measure(self, kept_bytes: int) -> tuple[BudgetPlan, int]:
        return self._measured(solve(self._trace, kept_bytes))

    def _measured(self, own: BudgetPlan | Infeasible) -> tuple[BudgetPlan, int]:
        plan = from_first_rank(own)
        assert isinstance(plan, BudgetPlan)
        if plan.digest not in self._peaks:
            call = partial(_steady, self._step.model, plan)
            self._peaks[plan.digest] = peak = self._step.peak(call)
            self._rounds.append((plan.kept_bytes, peak))
        return plan, self._peaks[plan.digest]
