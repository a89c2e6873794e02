"""What a region writes to where autograd does not look: state around it, values of its own."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

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


def clamped_before_two_readers(t, write):
    """Both readers save the value."""
    h = t @ t
    if write:
        h.data.clamp_(-0.1, 0.1)
    return torch.tanh(h) * h


@requirement(
    "SP-158",
    level="MUST",
    text=(
        "What a region writes past the version counter of a value of its own MUST reach the "
        "backward of each operator that saves the value after that, as without checkpointing, "
        "or be an error: from its first forward on, and in a later one only."
    ),
    rationale=(
        "a value that is rebuilt knows nothing of `h.data.clamp_()`: gradients were off by 0.6 "
        "without a word"
    ),
    since="0.1.0",
    profile="replay",
)
@pytest.mark.parametrize("size", [6, 96])
@pytest.mark.parametrize("writes", [(True, True), (False, True)], ids=["always", "later"])
def test_value_is_written_past_its_version_counter(part, device, writes, size):
    """In every forward, or in the second only; gradients are those of no checkpointing."""
    x, function = leaf(device, size, size), clamped_before_two_readers
    for write in writes:
        expected = torch.autograd.grad(function(x, write).sum(), x)[0]
        out = part.checkpoint(function, x, write, policy=part.recompute_all())
        try:
            found = torch.autograd.grad(out.sum(), x)[0]
        except RuntimeError:
            assert write
            continue
        assert torch.equal(found, expected)


def written_under_no_grad(t, write):
    """What one reader saved is written to before others read it."""
    h = t.exp() + t
    y = h + h.sin()
    with torch.no_grad():
        y.mul_(0.5)
    return (y + y.tanh()).sin() * y


@requirement(
    "SP-160",
    level="MUST",
    text=(
        "A region inside another checkpoint MUST have the gradients of no checkpointing from "
        "the first step of its function on: what it learns in a forward MUST NOT change what it"
        " saves when that forward is run again."
    ),
    rationale=(
        "a checkpoint knows saved tensors by their order: one that was saved beside others was "
        "handed out for another, and the gradient had another sign, without a word"
    ),
    since="0.1.0",
    profile="replay",
)
@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize(
    "function",
    [clamped_before_two_readers, written_under_no_grad],
)
def test_region_inside_a_checkpoint_of_torch(part, device, function, early_stop):
    """Three steps of a function that nobody ran before; gradients are plain's in each."""

    class Fresh(nn.Module):
        def forward(self, t):
            return function(t, True)

    module = Fresh()

    def around(t):
        return part.checkpoint(module, t, policy=part.recompute_all()) + 1

    for _ in range(3):
        x = leaf(device, 4, 4)
        expected = torch.autograd.grad(function(x, True).sum(), x)[0]
        torch_checkpoint(around, x, use_reentrant=False, early_stop=early_stop).sum().backward()
        assert torch.equal(x.grad, expected)
