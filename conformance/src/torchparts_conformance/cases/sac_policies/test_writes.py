"""What a region writes to where autograd does not look: state around it, values of its own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from torchparts_conformance import requirement

from .test_changes import leaf

aten = torch.ops.aten


class Average(nn.Module):
    """Follows what it sees and takes that off; counts its calls, and reads that."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("average", torch.linspace(-1, 1, 4))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, t):
        """Read both, and write to both."""
        y = self.linear(t) * (self.calls + 1)
        self.calls.add_(1)
        with torch.no_grad():
            self.average.lerp_(y.mean(0), 0.1)
        return torch.tanh(y - self.average) * y


def batch_norm():
    """Statistics that no gradient depends on."""
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())


def nothing(ctx, op, *args, **kwargs):
    """Keep nothing."""
    return False


@requirement(
    "SP-157",
    level="MUST",
    text=(
        "What a region writes to and did not make, as running averages and buffers, MUST be "
        "read in backward as its forward read it, and MUST advance once: gradients and buffers "
        "are those of no checkpointing, bit by bit."
    ),
    rationale=(
        "a codebook, a centre or a spectral norm that moves in forward gives a recomputation "
        "other values: reproduced with torch's checkpoint, gradients off by their own size "
        "without a word"
    ),
    since="0.1.0",
    profile="robust",
)
@pytest.mark.parametrize("policy", [nothing, [aten.mm.default]], ids=["nothing", "products"])
@pytest.mark.parametrize("make", [Average, batch_norm])
def test_state_that_a_region_reads_and_writes(part, device, make, policy):
    """Three steps: gradients, averages and counts."""
    results = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        module, x = make().to(device), leaf(device, 6, 4)
        found = []
        for _ in range(3):
            out = part.checkpoint(module, x, policy=policy) if checkpointed else module(x)
            found += torch.autograd.grad(out.sum(), [*module.parameters(), x])
        results.append(found + list(module.buffers()))
    assert all(map(torch.equal, *results))


class ReadsStatistics(nn.Module):
    """Reads the statistics that its batch norm has just written to."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, t):
        """Scale what was normalised by them."""
        y = self.norm(self.linear(t))
        return y.tanh() * (self.norm.running_mean * 3 + self.norm.running_var)


def norms(ctx, op, *args, **kwargs):
    """Keep what batch norms return, whichever the device has."""
    return "batch_norm" in op.name()


@requirement(
    "SP-215",
    level="MUST",
    text=(
        "A region that reads the running statistics of a batch norm after it MUST read them in "
        "backward as in its forward, also where a policy keeps the norm's output and another "
        "forward has moved them since: gradients and statistics MUST be those of no "
        "checkpointing, bitwise."
    ),
    rationale=(
        "a kept norm does not run again, and nothing but it says what it wrote beside its "
        "output: with the statistics from before it gradients were others, without a word"
    ),
    since="0.1.0",
    profile="robust",
)
@pytest.mark.parametrize("forwards", [1, 2])
@pytest.mark.parametrize("policy", [nothing, norms])
def test_statistics_that_are_read_after_their_batch_norm(part, device, policy, forwards):
    """Two steps, of one or two batches whose forwards come before any backward."""
    results = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        module = ReadsStatistics().to(device)
        found = []
        for _ in range(2):
            given = [leaf(device, 6, 4), (leaf(device, 6, 4) * 2).detach().requires_grad_()]
            outs = [
                part.checkpoint(module, x, policy=policy) if checkpointed else module(x)
                for x in given[:forwards]
            ]
            for x, out in zip(given, outs, strict=False):
                found += torch.autograd.grad(out.sum(), [*module.parameters(), x])
        results.append(found + list(module.buffers()))
    assert all(map(torch.equal, *results))
