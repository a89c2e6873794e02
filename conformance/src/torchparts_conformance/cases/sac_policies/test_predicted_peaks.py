"""What a step takes under a plan is told before it runs."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from torchparts_conformance import requirement

from .test_budget_plans import Stack, grown, stack

ROWS, NEAR = 1024, 0.03


def planned(part, trace, share):
    """A plan that keeps this share of what it may; None keeps everything, without a plan."""
    if share is None:
        return None
    low = part.solve(trace, 0).smallest_bytes
    high = part.solve(trace, "100%").kept_bytes
    return part.solve(trace, low + int(share * (high - low)))


@requirement(
    "SP-213",
    level="MUST",
    text=(
        "What is predicted for the peak of a step, without checkpointing and under plans that "
        "keep any share of what they may, MUST be within 3 % of what the allocator counts in "
        "such a step; where everything is kept, a prediction from fake tensors, which have no "
        "data, MUST be within 3 % of one from others."
    ),
    rationale=(
        "a plan is searched for by running out of memory where nothing tells a step's peak "
        "before it runs"
    ),
    since="0.1.0",
    profile="budget",
)
@pytest.mark.parametrize("share", [None, 1.0, 0.7, 0.4, 0.0])
def test_peak_is_told_before_the_step_runs(part, device, share):
    """The allocator is asked, once engines have learned from two steps."""
    model, x = stack(device, rows=ROWS)
    step = part.profile_step(model, x)
    plan = planned(part, step.trace, share)

    def run():
        model.zero_grad(set_to_none=True)
        # Nobody holds the output while backward runs.
        (model(x) if plan is None else part.checkpoint(model, x, policy=plan)).sum().backward()

    resident = [*model.parameters(), *model.buffers(), x]
    held = sum(tensor.untyped_storage().nbytes() for tensor in resident)
    for _ in range(2):
        run()
    model.zero_grad(set_to_none=True)
    assert step.peak_bytes(plan) == pytest.approx(held + grown(run, device), rel=NEAR)


@requirement("SP-213")
@pytest.mark.parametrize("share", [None, 1.0])
def test_peak_is_told_from_fake_tensors(part, device, share):
    """Which have no data: as from others, each with a plan of its own."""
    model, x = stack(device, rows=ROWS)
    real = part.profile_step(model, x)
    with FakeTensorMode(), torch.device(device):
        fake = part.profile_step(Stack(), torch.randn(ROWS, 32))
    told, expected = (each.peak_bytes(planned(part, each.trace, share)) for each in (fake, real))
    assert told == pytest.approx(expected, rel=NEAR)
