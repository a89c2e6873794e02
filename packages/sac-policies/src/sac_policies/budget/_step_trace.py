"""One training step as a value, and what it would take under a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from .._errors import BudgetError, shown
from ..policies._budget_plan import BudgetPlan
from ..policies._plans import Unit
from ._rehearsal import peak_growth_of
from ._step import Loss, Step, check_step
from ._step_run import StepRun, recorded
from ._trace import Trace


@dataclass(frozen=True)
class StepTrace:
    """A step that was run once, without checkpointing, and what it would take under plans.

    Attributes:
        trace: of its forward, to solve for plans.
        resident_bytes: parameters, buffers and batch.
    """

    trace: Trace
    resident_bytes: int
    _run: StepRun

    def peak_bytes(self, plan: BudgetPlan | None = None) -> int:
        """Predict the most memory in use during a step, in bytes.

        Counts parameters, buffers, gradients, the batch and all that forward and backward allocate;
        not optimizer state, nor the buckets that DDP keeps.

        Args:
            plan: for the whole model as one eager region, solved from `trace`;
                without one, nothing is checkpointed.

        Raises:
            BudgetError: no such plan, or one of another trace.
        """
        if plan is not None:
            self._check(plan)
        return self.resident_bytes + peak_growth_of(self._run, plan)

    def _check(self, plan: object) -> None:
        if not isinstance(plan, BudgetPlan) or plan.backend != "eager":
            raise BudgetError(
                f"sac_policies.StepTrace.peak_bytes: plan {shown(plan)} is no plan for eager code, "
                "but its replays are what is predicted. Pass what solve(step.trace, budget) "
                "returns."
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
    """Run a training step, to predict what it takes under any plan without running that.

    Runs three forwards and one backward. Collective where a process group is initialised.

    Args:
        model: on the device it trains on, in the mode it trains in; left as it was. Where its
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
        >>> import torch
        >>> from sac_policies import solve
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 8))
        >>> step = profile_step(model, torch.ones(512, 64))
        >>> step.peak_bytes(solve(step.trace, "50%")) <= step.peak_bytes()
        True
    """
    check_step("profile_step", model, loss)
    step = Step("profile_step", model, batch, loss)
    with step.leaving_the_model():
        step.settle_buckets()
        return traced_step(step, step.trace(unit))


def traced_step(step: Step, trace: Trace) -> StepTrace:
    """Run and record the step whose forward was profiled. Collective."""
    run = recorded(step)
    names, found = [op.name for op in trace.ops], run.names()
    if names != found:
        raise BudgetError(
            f"sac_policies.{step.where}: forwards of a step ran {len(names)} and {len(found)} "
            "operators that differ, but what is predicted is of one sequence. Fix what changes "
            "between calls."
        )
    return StepTrace(trace, step.resident(), run)
