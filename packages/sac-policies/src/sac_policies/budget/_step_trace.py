"""A recorded training step, and its predicted memory under a plan."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from .._errors import BudgetError, shown
from ..policies._budget_plan import BudgetPlan
from ..policies._plans import Unit
from ._agree import check_equal
from ._measure import Marks
from ._profile import check_unit, recorded_forward, trace_of
from ._rehearsal import peak_growth_of
from ._run import Recorder, Run
from ._step import Loss, Step, check_step
from ._trace import Trace


@dataclass(frozen=True)
class StepTrace:
    """A step that was run once, without checkpointing, for predictions under plans.

    Attributes:
        trace: of its forward, to solve for plans.
        resident_bytes: parameters, buffers and batch.
    """

    trace: Trace
    resident_bytes: int
    _run: Run

    def peak_bytes(self, plan: BudgetPlan | None = None) -> int:
        """Predict the peak memory of a step, in bytes.

        Counts parameters, buffers, gradients, the batch and all allocations of forward and
        backward, but neither optimizer state nor the buckets of DDP.

        Args:
            plan: for the whole model as one eager region, solved from `trace`;
                without one, nothing is checkpointed.

        Raises:
            BudgetError: not a plan, or a plan of another trace.
        """
        if plan is not None:
            self._check(plan)
        return self.resident_bytes + peak_growth_of(self._run, plan)

    def _check(self, plan: object) -> None:
        if not isinstance(plan, BudgetPlan):
            raise BudgetError(
                f"sac_policies.StepTrace.peak_bytes: plan {shown(plan)} is a "
                f"{type(plan).__name__}, but what is predicted is a step under a BudgetPlan. Pass "
                "what solve(step.trace, budget) returns."
            )
        calls = {op.key for op in self.trace.ops}
        missing = [call for call, _ in plan.choices if call not in calls]
        if missing:
            name, number = missing[0]
            raise BudgetError(
                f"sac_policies.StepTrace.peak_bytes: plan {plan.digest} lists {name}[{number}], "
                "but this step has no such call. Solve for the trace of this step."
            )


def profile_step(
    model: nn.Module, batch: Any, *, loss: Loss | None = None, unit: Unit | None = None
) -> StepTrace:
    """Run a training step once, to predict its memory under any plan.

    Runs up to three forwards and one backward. Collective where a process group is initialised.

    Args:
        model: on the device it trains on, in the mode it trains in; it does not change. Where its
            parameters and the batch are fake (`FakeTensorMode`), nothing is allocated.
        batch: a tuple of its arguments, a dict of its keyword arguments, or its one argument.
        loss: from the model's output to a scalar; by default its own loss, else the sum of its
            tensors.
        unit: of the forward's trace, as for `profile`.

    Returns:
        The step, whose `trace` can be solved for plans.

    Raises:
        BudgetError: `model` is not a module, its output has no gradient, or two forwards run
            different operators.

    Example:
        >>> from sac_policies import solve
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 8))
        >>> step = profile_step(model, torch.ones(512, 64))
        >>> step.peak_bytes(solve(step.trace, "50%")) <= step.peak_bytes()
        True
    """
    check_step("profile_step", model, loss)
    check_unit(unit, where="profile_step")
    step = Step("profile_step", model, batch, loss)
    with step.leaving_the_model():
        step.settle_buckets()
        return traced_step(step, unit)


def traced_step(step: Step, unit: Unit | None) -> StepTrace:
    """Record a step, and time its forward. Collective; ranks must run the same operators."""
    # The first mode in a process imports modules; their frames would keep tensors of the forward
    # alive.
    Recorder().record(partial(torch.empty, 0))
    chosen = unit or ("flops" if step.is_dry else "ns")
    # The profiler that reads the allocator would distort times.
    timed = [recorded_forward(step.forward, chosen) for _ in range(2 if chosen == "ns" else 0)]
    recorder = Recorder(None if timed else chosen, None if step.is_dry else Marks(step.device))
    run = recorder.record(partial(step.run, partial(recorder.forward, step.model), recorder))
    trace = trace_of(run, timed, chosen, where=step.where)
    check_equal(trace.digest, what="trace", where=step.where)
    return StepTrace(trace, step.resident(), run)
