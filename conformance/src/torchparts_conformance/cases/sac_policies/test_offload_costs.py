"""What copies cost a plan that offloads: what somebody waits for, and nothing that is hidden."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from torchparts_conformance import requirement

OPERATOR_NS = 10**6


def _trace(part, device):
    """Of a forward in which whatever makes something takes a millisecond."""
    torch.manual_seed(0)
    layers = [nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.Tanh(), nn.Linear(64, 64)]
    x = torch.randn(32, 64, device=device)
    trace = part.profile(nn.Sequential(*layers).to(device), x, unit="ns")
    ops = (dataclasses.replace(op, cost=OPERATOR_NS * bool(op.out_bytes)) for op in trace.ops)
    return dataclasses.replace(trace, ops=tuple(ops))


def _waited(part, trace, plan):
    """What is offloaded of a trace, in bytes, and the nanoseconds of a plan that are no work."""
    decided, repeated, moved = dict(plan.choices), 0, 0
    for item in trace.items():
        decision = decided.get(trace.ops[item.ops[0]].key)
        if decision is part.Decision.OFFLOAD:
            moved += item.kept_bytes
        elif decision is not part.Decision.SAVE:
            repeated += item.cost
    return moved, plan.recompute_cost - repeated


@requirement(
    "SP-212",
    level="MUST",
    text=(
        "Of copies to the host and back, a plan that offloads MUST count what they take longer "
        "than the forward, in each direction and each of the `regions` in a row that it is for,"
        " and for one region all copies back; it MUST NOT count copies out that later operators"
        " of the region hide, nor copies back to the other regions that a forward's time hides."
    ),
    rationale=(
        "counted in full, copies are hardly ever worth it: a block's backward hides those of "
        "the block before; not counted at all, they stop the device"
    ),
    since="0.1.0",
    profile="budget",
)
@pytest.mark.parametrize("regions", [1, 8])
@pytest.mark.parametrize("share", [0.0, 0.2, 0.5])
def test_copies_that_cannot_be_hidden_are_counted(part, device, regions, share):
    """All of them together take three times as long as a forward."""
    trace = _trace(part, device)
    forward = sum(op.cost for op in trace.ops)
    rate = trace.total_bytes() * 10**9 // (3 * forward)
    plan = part.solve(trace, share, host_bandwidth=rate, regions=regions)
    moved, waited = _waited(part, trace, plan)
    copies = moved * 10**9 / rate
    longer = max(0, copies - forward)
    assert waited * regions >= regions * longer + copies + (regions - 1) * longer - regions
    assert 0 <= plan.gap <= 1


@requirement("SP-212")
@pytest.mark.parametrize("regions", [1, 10, 1000])
def test_copies_that_work_hides_are_not_counted(part, device, regions):
    """Each takes a tenth of the operator after it, and there is one after all but the last."""
    trace = _trace(part, device)
    largest = max(op.out_bytes for op in trace.ops)
    rate = 10 * largest * 10**9 // OPERATOR_NS
    plan = part.solve(trace, 0, host_bandwidth=rate, regions=regions)
    moved, _ = _waited(part, trace, plan)
    back = moved * 10**9 / rate / regions
    assert plan.kept_bytes == 0
    assert moved > 0
    assert plan.recompute_cost <= OPERATOR_NS / 10 + back + len(trace.ops)
