"""Values that a region writes past their version counter, alone and inside a checkpoint."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import sac_policies


def leaf(*shape):
    """Spread values of one shape that need a gradient."""
    numel = torch.Size(shape).numel()
    return torch.linspace(-1.3, 1.7, numel).reshape(shape).requires_grad_()


class Fresh(nn.Module):
    """Wrap a function anew, so that its next region is a first step."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        """Call it."""
        return self.function(*args)


def clamped_before_two_readers(t, write):
    """Both readers save the value."""
    h = t @ t
    if write:
        h.data.clamp_(-0.1, 0.1)
    return torch.tanh(h) * h


def written_under_no_grad(t, write):
    """What one reader saved is written to before others read it."""
    h = t.exp() + t
    y = h + h.sin()
    with torch.no_grad():
        y.mul_(0.5)
    return (y + y.tanh()).sin() * y


@pytest.mark.parametrize("size", [6, 96])
@pytest.mark.parametrize("writes", [(True, True), (False, True)], ids=["always", "later"])
def test_value_is_written_past_its_version_counter(writes, size):
    """In every forward, or in the second only; gradients are those of no checkpointing."""
    x, function = leaf(size, size), clamped_before_two_readers
    for write in writes:
        expected = torch.autograd.grad(function(x, write).sum(), x)[0]
        out = sac_policies.checkpoint(function, x, write, policy=sac_policies.recompute_all())
        try:
            found = torch.autograd.grad(out.sum(), x)[0]
        except RuntimeError:
            assert write
            continue
        assert torch.equal(found, expected)


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize(
    "function",
    [clamped_before_two_readers, written_under_no_grad],
)
def test_region_inside_a_checkpoint_of_torch(function, early_stop):
    """Three steps of a function that nobody ran before; gradients are plain's in each."""

    class Fresh(nn.Module):
        def forward(self, t):
            return function(t, True)

    module = Fresh()

    def around(t):
        return sac_policies.checkpoint(module, t, policy=sac_policies.recompute_all()) + 1

    for _ in range(3):
        x = leaf(4, 4)
        expected = torch.autograd.grad(function(x, True).sum(), x)[0]
        torch_checkpoint(around, x, use_reentrant=False, early_stop=early_stop).sum().backward()
        assert torch.equal(x.grad, expected)


@pytest.mark.parametrize("policy", [[], ["aten.mul"]], ids=["nothing", "products"])
@pytest.mark.parametrize("is_view", [False, True], ids=["whole", "view"])
@pytest.mark.parametrize("is_first", [False, True], ids=["after", "before"])
def test_statistics_read_beside_batch_norm_match_plain(policy, is_view, is_first):
    """Batch norm counts no version of its writes: autograd reads what the buffer holds then."""

    def gradients(call):
        torch.manual_seed(0)
        norm, x, w = torch.nn.BatchNorm2d(4), torch.randn(3, 4, 2, 2), torch.randn(4)
        norm.running_mean.normal_()
        w = (w.view(4, 1, 1) if is_view else w).requires_grad_()

        def scaled():
            return w * (norm.running_mean[:, None, None] if is_view else norm.running_mean)

        def function(x):
            first = scaled() if is_first else None
            y = norm(x)
            scale = scaled() if first is None else first
            return (y * scale.reshape(4, 1, 1)).sin()

        call(function, x.requires_grad_()).sum().backward()
        return x.grad, w.grad, norm.running_mean

    found = gradients(lambda function, x: sac_policies.checkpoint(function, x, policy=policy))
    expected = gradients(lambda function, x: function(x))
    assert all(map(torch.equal, found, expected))
