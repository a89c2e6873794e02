"""What plans say that regions wait for copies is what they wait for, by the device's clock."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from sac_policies import Decision, checkpoint, profile, save_by_index, solve
from sac_policies.budget.offloading._copies import Copies, Stream
from sac_policies.engines.contexts._moved import leaving

KERNEL_US = 100


def timed(trace):
    """The same trace on a device on which all that makes something takes as long."""
    ops = (dataclasses.replace(op, cost=1000 * KERNEL_US * bool(op.out_bytes)) for op in trace.ops)
    return dataclasses.replace(trace, unit="ns", ops=tuple(ops))


def function(weights, x):
    """Some values for each weight, of its own size; the last is as x."""
    for weight in weights:
        y = (x * weight).sin()
        x = x + (y * y).exp().mean(dim=0)
    return x


def given(device, widths):
    """Weights of (rows, 256)."""
    torch.manual_seed(0)
    return [torch.randn(rows, 256, device=device).requires_grad_() for rows in widths]


def run(device, policy, weights, regions):
    """Run two steps of a chain of regions; tell of the last one.

    Returns:
        Gradients on the host, bytes held between forward and backward, and microseconds of the
        forward and of the step.
    """
    for _ in range(2):  # the first shows the largest value, and which values are read
        x = torch.linspace(-1, 1, 256, device=device).requires_grad_()
        torch.accelerator.synchronize()
        before = torch.simdev.memory_allocated(device)
        began, y = torch.simdev.host_us(), x
        for _ in range(regions):
            y = checkpoint(
                function, weights, y, policy=policy, engine="contexts", determinism_check="none"
            )
        torch.accelerator.synchronize()
        forward = torch.simdev.host_us() - began
        held = torch.simdev.memory_allocated(device) - before
        grads = torch.autograd.grad(y.sum(), [x, *weights])
        torch.accelerator.synchronize()
        whole = torch.simdev.host_us() - began
    return [grad.cpu() for grad in grads], held, forward, whole


@pytest.mark.parametrize("seed", range(8))
def test_a_forward_waits_as_the_plan_counts(sim, device, monkeypatch, seed):
    """To the nanosecond, rounding aside; any values offloaded, whatever copies take."""
    r = random.Random(seed)
    weights = given(device, [r.choice((4, 16, 64, 100)) for _ in range(r.randrange(2, 6))])
    x = torch.ones(256, device=device, requires_grad=True)
    trace = timed(profile(function, weights, x, unit="flops"))
    away = [n for n, op in enumerate(trace.ops) if op.out_bytes and r.random() < 0.4]
    policy = save_by_index((trace.ops[n].key, Decision.OFFLOAD) for n in away)
    rate = r.choice((0.05, 0.2, 0.6, 2))
    sim.simulate(virtual=True, kernel_us=KERNEL_US, copy_gbps=rate)
    monkeypatch.setattr(leaving, "_largest", 0)
    _, _, forward, _ = run(device, policy, weights, 1)
    copies = Copies.of(trace.ops, int(rate * 1e9), 1)
    stream = Stream(copies, max(copies.sizes[n] for n in away))
    for n in away:
        stream.copy(n)
    expected = copies.work + stream.waited + stream.left
    assert 1000 * forward == pytest.approx(expected, abs=2 * len(away))


@pytest.mark.parametrize("regions", [1, 6])
@pytest.mark.parametrize("rate", [0.1, 0.4, 1.5])
@pytest.mark.parametrize("share", [0, 0.3])
def test_a_step_waits_no_longer_than_its_plan_says(sim, device, monkeypatch, share, rate, regions):
    """Beside one whose copies take no time; gradients are the plain ones, to the last bit."""
    weights = given(device, [4, 64, 16, 100, 64])
    x = torch.ones(256, device=device, requires_grad=True)
    trace = timed(profile(function, weights, x, unit="flops"))
    plan = solve(trace, share, engine="contexts", host_bandwidth=rate * 1e9, regions=regions)
    monkeypatch.setattr(leaving, "_largest", 0)
    steps = {}
    for gbps in (rate, 1e9):
        sim.simulate(virtual=True, kernel_us=KERNEL_US, copy_gbps=gbps)
        grads, held, _, steps[gbps] = run(device, plan, weights, regions)
    waits = 1000 * (steps[rate] - steps[1e9])
    assert waits <= plan.copy_cost * regions + 2 * len(trace.ops) * regions
    assert plan.kept_bytes <= share * trace.total_bytes("contexts")
    # Besides, regions hold what they are given, and what was offloaded last is there.
    largest = max(op.out_bytes for op in trace.ops)
    assert held <= regions * (plan.kept_bytes + x.nbytes) + largest
    everything = save_by_index((op.key, Decision.SAVE) for op in trace.ops)
    plain, *_ = run(device, everything, weights, regions)
    assert all(map(torch.equal, grads, plain))
