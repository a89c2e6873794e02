"""Values that backward makes again: how often, in which format, from what."""

from __future__ import annotations

import weakref
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import sac_policies

aten = torch.ops.aten


class Operators(TorchDispatchMode):
    """Counts operators, and watches the storages that silu makes."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()
        self.made = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.counts[func] += 1
        if func is aten.silu.default:
            self.made.append(weakref.ref(out.untyped_storage()))
        return out


def leaf(*shape):
    """Spread values of one shape that need a gradient."""
    numel = torch.Size(shape).numel()
    return torch.linspace(-1.3, 1.7, numel).reshape(shape).requires_grad_()


def replay(function, *args):
    """Call a region that keeps as little as the engine can."""
    return sac_policies.checkpoint(function, *args, policy=sac_policies.recompute_all())


class Made(TorchDispatchMode):
    """Watches the storages that silu makes."""

    def __init__(self):
        super().__init__()
        self.storages = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.silu.default:
            self.storages.append(weakref.ref(out.untyped_storage()))
        return out


class Cubed(torch.autograd.Function):
    """Saves what it is given."""

    @staticmethod
    def forward(ctx, x):
        """Multiply it by itself, twice."""
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx, grad):
        """Read what was saved."""
        (x,) = ctx.saved_tensors
        return grad * 3 * x * x


def test_shared_value_is_replayed_once_and_dropped():
    """Two products read one silu; one of two readers alone leaves nothing behind."""
    x, w1, w2 = leaf(5, 4), leaf(4, 4), leaf(4, 4)

    def function(t):
        y = F.silu(t)
        return y @ w1, y @ w2

    one, two = replay(function, x)
    with Operators() as partial:
        torch.autograd.grad(one.sum(), w1, retain_graph=True)
        alive = [made() for made in partial.made]
    assert alive == [None]
    with Operators() as whole:
        torch.autograd.grad((one + two).sum(), [x, w1, w2])
    assert whole.counts[aten.silu.default] == 1


@pytest.mark.parametrize("kind", [nn.GroupNorm, nn.BatchNorm2d])
def test_channels_last_is_replayed_as_it_was(kind):
    """A normalization whose result the next operator saves."""
    norm = kind(*((4, 16) if kind is nn.GroupNorm else (16,)))
    torch.manual_seed(0)
    x = torch.randn(2, 16, 32, 32).to(memory_format=torch.channels_last).requires_grad_()
    inputs = [x, *norm.parameters()]

    def function(t):
        return F.silu(norm(t))

    expected = torch.autograd.grad(function(x).square().sum(), inputs)
    found = torch.autograd.grad(replay(function, x).square().sum(), inputs)
    assert all(map(torch.equal, found, expected))
    assert found[0].stride() == expected[0].stride()


def test_what_an_in_place_operator_reads_is_replayed_once():
    """The graph saves a copy of what was written to, for the operator and for its replay."""
    x = leaf(5, 4)

    def function(t):
        y = F.silu(t)
        y /= t.exp()
        return (y + t).sin()

    out = replay(function, x)
    with Made() as made:
        out.sum().backward()
    assert len(made.storages) == 1


def test_what_a_function_was_given_is_dropped_before_backward_ends():
    """Its own node reads it, and so does whatever makes its output again; nobody else."""
    x, w = leaf(5, 4), leaf(4, 4)
    given, alive = x * 2, []
    given.register_hook(lambda grad: alive.extend(each() for each in made.storages))
    out = replay(lambda t: Cubed.apply(F.silu(t)) @ w, given)
    with Made() as made:
        out.sum().backward()
    assert all(each is None for each in alive)
