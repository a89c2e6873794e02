"""Runs training steps; finds the plan whose measured peak fits a budget.

Rule 1. A plan is accepted only after a step under it was measured within the budget.
Rule 2. The model is left as it was: gradients, buffers and random state are put back.
Rule 3. All ranks decide from the same numbers (rank 0's plans, the largest peak), so they run
        the same steps and return the same plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .._checkpoint import checkpoint
from .._errors import BudgetError, shown
from .._tensors import tensors_in
from ..policies._budget_plan import BudgetPlan, Infeasible
from ..policies._checked import is_count
from ..policies._plans import Unit
from ._agree import check_equal, from_first_rank, largest
from ._measure import peak_growth, storage_bytes
from ._record import profile
from ._sizes import Budget, budget_bytes
from ._solve import solve, spread
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
    loss: Callable[[Any], torch.Tensor] | None = None,
    rounds: int = 16,
    unit: Unit = "ns",
) -> Fit | Infeasible:
    """Find the plan that repeats the least work while a step's measured peak fits `budget`.

    Profiles, solves, runs a step, corrects, and keeps the best plan that was measured to fit.
    The peak counts parameters, buffers, gradients, the batch and all that a forward and
    backward allocate; not optimiser state. Collective where a process group is initialised.

    Args:
        model: on the device it trains on, in the mode it trains in; left as it was.
        batch: a tuple of its arguments, a dict of its keyword arguments, or its one argument.
        budget: bytes (int), "6 GiB", or a fraction of the peak without checkpointing.
        loss: from the model's output to a scalar; by default the sum of its float tensors.
        rounds: plans between keeping all and keeping least to try until one fits, and as many
            that keep every n-th value where none does; at least 1.
        unit: what work is measured in, see `profile`; with "flops" equal runs give equal plans.

    Returns:
        The plan and its peak, or an `Infeasible` with the smallest peak measured.

    Raises:
        BudgetError: `model` is not a module, `rounds` is below 1, the budget does not parse, the
            output has no gradient, or ranks run different operators.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 8))
        >>> found = fit(model, torch.ones(32, 64), "100 KiB")
        >>> found.peak_bytes <= 100 * 1024
        True
    """
    _check(model, rounds, loss)
    budget_bytes(budget, total_bytes=0)  # refused before anything runs
    step = _Step(model, batch, loss or _sum_of)
    with _as_it_was(model, step.device):
        trace = from_first_rank(step.trace(unit))
        return _Search(trace, step).run(budget, rounds)


def _check(model: object, rounds: object, loss: object) -> None:
    if not isinstance(model, nn.Module):
        raise BudgetError(
            f"sac_policies.fit: model {shown(model)} is a {type(model).__name__}, but the state of "
            "a module is put back after measuring. Pass an nn.Module."
        )
    if not (is_count(rounds) and rounds != 0):
        raise BudgetError(
            f"sac_policies.fit: rounds {shown(rounds)} leaves nothing to try, but a plan is found "
            "by measuring. Use at least 1."
        )
    if not (loss is None or callable(loss)):
        raise BudgetError(
            f"sac_policies.fit: loss {shown(loss)} is a {type(loss).__name__}, but it is called "
            "with the model's output. Pass a function that returns a scalar, or leave it out."
        )


class _Step:
    """One forward and backward of the model on one batch."""

    def __init__(self, model: nn.Module, batch: Any, loss: Callable[[Any], torch.Tensor]) -> None:
        self._model, self._loss = model, loss
        self._args = batch if isinstance(batch, tuple) else ()
        self._kwargs = batch if isinstance(batch, dict) else {}
        if not isinstance(batch, (tuple, dict)):
            self._args = (batch,)
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))

    def trace(self, unit: Unit) -> Trace:
        """Profile the forward; the ranks must agree on its operators. Collective."""
        trace = profile(self._model, *self._args, repeats=2, unit=unit, **self._kwargs)
        check_equal(trace.digest, what="trace")
        return trace

    def peak(self, plan: BudgetPlan) -> int:
        """Run a step under `plan`; return the largest peak of all ranks. Collective."""
        for parameter in self._model.parameters():
            parameter.grad = None
        growth = peak_growth(lambda: self._run(plan), device=self.device)
        return largest(self._resident() + growth)

    def _run(self, plan: BudgetPlan) -> None:
        out = checkpoint(self._model, *self._args, policy=plan, engine="recipe", **self._kwargs)
        self._loss(out).backward()

    def _resident(self) -> int:
        batch = tensors_in((self._args, self._kwargs))
        tensors = [*self._model.parameters(), *self._model.buffers(), *batch]
        return storage_bytes(tensors, device=self.device)


class _Search:
    """Plans measured so far, between one that fits and one that does not."""

    def __init__(self, trace: Trace, step: _Step) -> None:
        self._trace, self._step = trace, step
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
            self._peaks[plan.digest] = peak = self._step.peak(plan)
            self._rounds.append((plan.kept_bytes, peak))
        return plan, self._peaks[plan.digest]


def _sum_of(out: Any) -> torch.Tensor:
    tensors = [tensor for tensor in tensors_in(out) if tensor.requires_grad]
    if not tensors:
        raise BudgetError(
            "sac_policies.fit: the model's output has no tensor that needs a gradient, but a "
            "step ends in backward. Pass loss=, from the output to a scalar."
        )
    return torch.stack([tensor.sum().float() for tensor in tensors]).sum()


@contextmanager
def _as_it_was(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Put gradients, buffers and random state back at the end (Rule 2)."""
    grads = [(p, p.grad) for p in model.parameters()]
    buffers = [(b, b.clone()) for b in model.buffers()]
    kind = "cuda" if device.type == "cpu" else device.type
    accelerators = [] if device.type == "cpu" else [device]
    try:
        with torch.random.fork_rng(accelerators, device_type=kind), torch.enable_grad():
            yield
    finally:
        for parameter, grad in grads:
            parameter.grad = grad
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
