"""One training step as a value, and what it would take under a plan."""

from __future__ import annotations

from dataclasses import dataclass

from ..._errors import BudgetError, shown
from ...policies._budget_plan import BudgetPlan
from .._trace import Trace, TracedPack
from ._step_run import StepRun
from ._walk import Walk


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
        packs = None if plan is None else self._packs(plan)
        constants = self.trace.constants if plan is not None else ()
        drawn = frozenset(at for at, op in enumerate(self.trace.ops) if op.draws)
        walk = Walk(self._run, packs, constants, forward=len(self.trace.ops), drawn=drawn)
        return self.resident_bytes + walk.peak()

    def _packs(self, plan: BudgetPlan) -> list[tuple[TracedPack, bool]]:
        if not isinstance(plan, BudgetPlan) or plan.backend != "eager":
            raise BudgetError(
                f"sac_policies.StepTrace.peak_bytes: plan {shown(plan)} is no plan for eager code, "
                "but its replays are what is predicted. Pass what solve(step.trace, budget) "
                "returns."
            )
        trace = self.trace
        places = {op.key: at for at, op in enumerate(trace.ops)}
        missing = [call for call, _ in plan.choices if call not in places]
        if missing:
            name, number = missing[0]
            raise BudgetError(
                f"sac_policies.StepTrace.peak_bytes: plan {plan.digest} lists {name}[{number}], "
                "but this step has no such call. Solve for the trace of this step."
            )
        saved = {places[call] for call, _ in plan.choices}
        return [(pack, trace.is_kept(pack, saved)) for pack in trace.packs]
