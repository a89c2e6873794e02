"""Runs training steps; finds the plan whose measured peak fits a budget.

Rule 1. A plan is accepted only after a step under it was measured within the budget.
Rule 2. The model is left as it was: gradients, buffers and random state are put back.
Rule 3. All ranks decide from the same numbers (rank 0's plans, the largest peak), so they run
        the same steps and return the same plan.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from .._checkpoint import checkpoint
from .._errors import BudgetError, shown
from ..policies._budget_plan import BudgetPlan, Infeasible
from ..policies._checked import is_count
from ..policies._plans import Unit
from ._agree import from_first_rank
from ._sizes import Budget, budget_bytes
from ._solve import solve, spread
from ._step import Loss, Step, check_step
from ._trace import Trace


@dataclass(frozen=True)
class Fit:
    """A plan that was measured.

    Attributes:
        policy: for `checkpoint(model, *batch, policy=...)`.
        peak_bytes: most memory in use during a step under it; at most the budget.
        budget_bytes: the budget.
        rounds: (bytes kept, peak) of each plan that was measured, in order.
    """

    policy: BudgetPlan
    peak_bytes: int
    budget_bytes: int
    rounds: tuple[tuple[int, int], ...]


def fit(
    model: nn.Module,
    batch: Any,
    budget: Budget,
    *,
    loss: Loss | None = None,
    rounds: int = 16,
    unit: Unit = "ns",
    strict: bool = False,
) -> Fit | Infeasible:
    """Find the plan that repeats the least work while a step's measured peak fits `budget`.

    Profiles, solves, runs a step, corrects, and keeps the best plan that was measured to fit.
    The peak counts parameters, buffers, gradients, the batch and all that a forward and
    backward allocate; not optimiser state. Collective where a process group is initialised.

    Args:
        model: on the device it trains on, in the mode it trains in; left as it was.
        batch: a tuple of its arguments, a dict of its keyword arguments, or its one argument.
        budget: bytes (int), "6 GiB", or a fraction of the peak without checkpointing.
        loss: from the model's output to a scalar; by default the output's own `loss`, else the
            sum of its float tensors.
        rounds: plans between keeping all and keeping least to try until one fits, and as many
            that keep every n-th value where none does; at least 1.
        unit: what work is measured in, see `profile`; with "flops" equal runs give equal plans.
        strict: whether the plan refuses a forward that saves other tensors, as for another loss
            or batch; else it keeps those that it does not know, and warns once.

    Returns:
        The plan and its peak, or an `Infeasible` with the smallest peak measured.

    Raises:
        BudgetError: `model` is not a module, `rounds` is below 1, the budget does not parse, the
            output has no gradient, or ranks run different operators.

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
    with step.leaving_the_model():
        trace = from_first_rank(step.trace(unit))
        found = _Search(trace, model, step).run(budget, rounds)
    if not (strict and isinstance(found, Fit)):
        return found
    return replace(found, policy=replace(found.policy, strict=True))


def _check_rounds(rounds: object) -> None:
    if not (is_count(rounds) and rounds != 0):
        raise BudgetError(
            f"sac_policies.fit: rounds {shown(rounds)} leaves nothing to try, but a plan is found "
            "by measuring. Use at least 1."
        )


class _Search:
    """Plans measured so far, between one that fits and one that does not."""

    def __init__(self, trace: Trace, model: nn.Module, step: Step) -> None:
        self._trace, self._model, self._step = trace, model, step
        self._rounds: list[tuple[int, int]] = []
        self._peaks: dict[str, int] = {}

    def run(self, budget: Budget, rounds: int) -> Fit | Infeasible:
        """Keep less and less until a step fits, then as much more as still fits.

        The peak need not fall with the bytes kept: a long chain of replays brings back at once
        all that it passes. So the first plan that fits is looked for from above. Where none
        does, plans that keep every n-th value are tried, which have short chains whatever the
        work was measured to be: what they fit into is never infeasible.
        """
        low, high = self._trace.fixed_bytes(), self._trace.total_bytes()
        plan, peak = self._measure(high)
        allowed = budget_bytes(budget, total_bytes=peak)
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
        return Fit(plan, peak, allowed, tuple(self._rounds))

    def _spread(self, allowed: int, rounds: int) -> Fit | Infeasible:
        """Try plans that keep every n-th value, more values first."""
        for nth in range(2, rounds + 2):
            plan, peak = self._measured(spread(self._trace, nth))
            if peak <= allowed:
                return Fit(plan, peak, allowed, tuple(self._rounds))
        smallest = min(peak for _, peak in self._rounds)
        return Infeasible(budget_bytes=allowed, smallest_bytes=smallest)

    def _measure(self, kept_bytes: int) -> tuple[BudgetPlan, int]:
        return self._measured(solve(self._trace, kept_bytes))

    def _measured(self, own: BudgetPlan | Infeasible) -> tuple[BudgetPlan, int]:
        plan = from_first_rank(own)
        assert isinstance(plan, BudgetPlan)
        if plan.digest not in self._peaks:
            call = partial(checkpoint, self._model, policy=plan, engine="recipe")
            self._peaks[plan.digest] = peak = self._step.peak(call)
            self._rounds.append((plan.kept_bytes, peak))
        return plan, self._peaks[plan.digest]
