"""What a plan makes of a step is told from what the step did."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from sac_policies import (
    BudgetError,
    BudgetPlan,
    Decision,
    StepTrace,
    Trace,
    TracedOp,
    TracedPack,
    profile_step,
    recompute_all,
    solve,
)
from sac_policies.budget.predicting._step_run import Event, StepCall, StepRun, StepValue

KIB = 1024
CHAIN: list[Event] = [
    *(("call", 0), ("call", 1), ("call", 2), ("call", 3), ("free", 3)),
    *(("read", 2), ("call", 4), ("release", 2), ("free", 2)),
    *(("read", 1), ("call", 5), ("release", 1), ("free", 1), ("free", 4)),
    *(("read", 0), ("call", 6), ("release", 0), ("free", 0), ("free", 5)),
]
"""Four values in a row of which three are saved, then three gradients, two at a time."""


def step(most: dict[int, int]) -> StepTrace:
    """Each value has a KiB; what calls take for themselves while they run is given in KiB."""
    values = tuple(StepValue(at, at, KIB, 0) for at in range(7))
    calls = tuple(
        StepCall((at,), ((at - 1, 0),) if at else (), KIB * most.get(at, 1)) for at in range(7)
    )
    ops = tuple(
        TracedOp("aten.sin.default", at, KIB, 1, (at - 1,) if at else (), at) for at in range(4)
    )
    packs = tuple(TracedPack("aten.sin.default", at, 0, KIB) for at in range(3))
    saved = tuple((at, 0) for at in range(3))
    run = StepRun(calls, values, tuple(CHAIN), saved, {0: 2, 1: 3, 2: 4, 3: 4})
    return StepTrace(Trace("ns", ops, packs), 10 * KIB, run)


def plan(kept: str) -> BudgetPlan:
    """Keeps these of the three, of which each has a digit."""
    choices = tuple((("aten.sin.default", int(at)), Decision.SAVE) for at in kept)
    return BudgetPlan(choices, 0, 0, 0, "ns")


@pytest.mark.parametrize(
    ("kept", "most"),
    [
        ("012", 4),  # all, when the last is made
        ("", 4),  # all three are made for the first gradient, and held for the others
        ("1", 3),  # one chain of one value on each side of it
        ("0", 4),  # two are made of what is kept, for the first gradient
        ("2", 4),  # two are made, for the second gradient beside the first
    ],
)
def test_values_live_from_their_first_reader_to_their_last(kept: str, most: int) -> None:
    """Counted by hand, in KiB over what is resident."""
    assert step({}).peak_bytes(plan(kept)) == (10 + most) * KIB


@pytest.mark.parametrize(("kept", "most"), [("012", 11), ("02", 12), ("1", 11), ("", 11)])
def test_what_a_call_takes_for_itself_is_taken_where_it_runs_again(kept: str, most: int) -> None:
    """The second takes ten: beside one, or in backward beside a gradient and what is kept."""
    assert step({1: 10}).peak_bytes(plan(kept)) == (10 + most) * KIB


def test_nothing_is_checkpointed_without_a_plan() -> None:
    """As where all is kept."""
    found = step({5: 3})
    assert found.peak_bytes() == found.peak_bytes(plan("012")) == 16 * KIB


@pytest.mark.parametrize("wrong", [recompute_all(), 3, "50%"])
def test_what_is_no_plan_of_the_engine(wrong: Any) -> None:
    """The message says where plans come from."""
    step = profile_step(nn.Linear(4, 4), torch.ones(2, 4))
    with pytest.raises(BudgetError, match=r"peak_bytes: plan .* Pass what solve\(step\.trace"):
        step.peak_bytes(wrong)
    compiled = solve(step.trace, "100%", backend="compile")
    with pytest.raises(BudgetError, match="no plan for eager code"):
        step.peak_bytes(compiled)  # type: ignore[arg-type]


def test_plan_of_another_step() -> None:
    """The numbers of saved tensors are in the message."""
    one, other = (
        profile_step(nn.Sequential(*(nn.Tanh(),) * n, nn.Linear(4, 4)), leaf()) for n in (1, 3)
    )
    plan = solve(other.trace, "100%")
    with pytest.raises(BudgetError, match=r"lists aten.* but this step has no such call"):
        one.peak_bytes(plan)  # type: ignore[arg-type]


def leaf() -> torch.Tensor:
    """An input that needs a gradient."""
    return torch.ones(2, 4, requires_grad=True)
