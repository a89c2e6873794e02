"""State that a region writes without autograd's knowledge: outside state, and its own values."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from torchparts_conformance import requirement

from .test_changes import leaf

aten = torch.ops.aten


class Average(nn.Module):
    """Subtracts a running average of its input; counts its calls and uses the count."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("average", torch.linspace(-1, 1, 4))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, t):
        """Read both and write both."""
        y = self.linear(t) * (self.calls + 1)
        self.calls.add_(1)
        with torch.no_grad():
            self.average.lerp_(y.mean(0), 0.1)
        return torch.tanh(y - self.average) * y


def batch_norm():
    """Statistics that no gradient depends on."""
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())


def nothing(ctx, op, *args, **kwargs):
    """Save nothing."""
    return False


@requirement(
    "SP-157",
    "State outside a region that the region writes, such as running averages and buffers, MUST "
    "have its forward value in recomputation, with gradients bitwise those without checkpointing.",
    rationale=(
        "a codebook, a centre or a spectral norm advances in forward, so recomputation computes "
        "other values; reproduced with torch's checkpoint: gradients were silently wrong by 100 %"
    ),
)
@pytest.mark.parametrize("policy", [nothing, [aten.mm.default]], ids=["nothing", "products"])
@pytest.mark.parametrize("make", [Average, batch_norm])
def test_state_that_a_region_reads_and_writes(part, device, make, policy):
    """Gradients of three steps, each from the state that a step without checkpointing left."""
    plain, x = make().to(device), leaf(device, 6, 4)
    for _ in range(3):
        module = copy.deepcopy(plain)
        outs = part.checkpoint(module, x, policy=policy), plain(x)
        results = [
            torch.autograd.grad(out.sum(), [*of.parameters(), x])
            for out, of in zip(outs, (module, plain), strict=True)
        ]
        assert all(map(torch.equal, *results))


class ReadsStatistics(nn.Module):
    """Reads the statistics that its batch norm has just written."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, t):
        """Scale the normalized values by the statistics."""
        y = self.norm(self.linear(t))
        return y.tanh() * (self.norm.running_mean * 3 + self.norm.running_var)


def norms(ctx, op, *args, **kwargs):
    """Save results of batch norms, on every device."""
    return "batch_norm" in op.name()


@requirement(
    "SP-215",
    "If a region reads the running statistics of a batch norm after it, recomputation MUST read "
    "the same values as forward, also if the policy saves the norm's output and another forward "
    "has advanced the statistics, with gradients bitwise those without checkpointing.",
    rationale=(
        "a saved norm is not recomputed, so its running statistics need to be restored "
        "separately; without that gradients were silently wrong"
    ),
)
@pytest.mark.parametrize("forwards", [1, 2])
@pytest.mark.parametrize("policy", [nothing, norms])
def test_running_statistics_read_after_batch_norm(part, device, policy, forwards):
    """One or two batches, whose forwards both run before any backward."""
    results = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        module = ReadsStatistics().to(device)
        found = []
        given = [leaf(device, 6, 4), (leaf(device, 6, 4) * 2).detach().requires_grad_()]
        outs = [
            part.checkpoint(module, x, policy=policy) if checkpointed else module(x)
            for x in given[:forwards]
        ]
        for x, out in zip(given, outs, strict=False):
            found += torch.autograd.grad(out.sum(), [*module.parameters(), x])
        results.append(found)
    assert all(map(torch.equal, *results))
