"""Values that a region needs not keep, as it can make them again."""

from __future__ import annotations

import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import sac_policies


def leaf(*shape):
    """Spread values of one shape that need a gradient."""
    numel = torch.Size(shape).numel()
    return torch.linspace(-1.3, 1.7, numel).reshape(shape).requires_grad_()


class Storages(TorchDispatchMode):
    """Notes every storage that is made."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {id(each.untyped_storage()) for each in args if isinstance(each, torch.Tensor)}
        if isinstance(out, torch.Tensor) and id(out.untyped_storage()) not in given:
            self.made.append(weakref.ref(out.untyped_storage()))
        return out

    def alive_bytes(self):
        """Bytes of those that somebody has."""
        alive = {id(each): each for each in (ref() for ref in self.made) if each is not None}
        return sum(each.nbytes() for each in alive.values())


def _rotated(t, cos, sin):
    left, right = t.chunk(2, -1)
    return t * cos + torch.cat([-right, left], -1) * sin


def _attended(t):
    """Attention saves its result; of the sum only the operands are there."""
    query, key, value = (each.unsqueeze(0) for each in (t, t.sin(), t.cos()))
    return F.scaled_dot_product_attention(query, key, value).squeeze(0) + t


def _differentiated(t):
    made = (t + t).sin()
    (inner,) = torch.autograd.grad(made.sum(), t, retain_graph=True)
    return made * inner.detach()


def _gelu(t):
    return t * (1.0 + torch.tanh(t.sin() + torch.pow(t, 3.0)))


@pytest.mark.parametrize(
    "kind", [*("residual", "rotary", "tanh", "softmax", "gelu", "row", "filled", "bias", "zeros")]
)
def test_nothing_is_kept_of_what_can_be_rebuilt(kind):
    """Only the output is there."""
    x, w = leaf(64, 64), leaf(64, 64)
    cos, sin = (torch.linspace(0, 1, 64).add(each).cos() for each in (0, 1))
    function = {
        "residual": lambda t: (t + t.sin()).cos() @ w,
        "rotary": lambda t: _rotated(t.sin(), cos, sin) @ w,
        "tanh": lambda t: (t @ w).tanh() @ w,
        "softmax": lambda t: (t @ w).softmax(-1) @ w,
        "gelu": lambda t: _gelu(t) @ w,
        "row": lambda t: (t.sin() + cos).cos() @ w,
        "filled": lambda t: t.sin().masked_fill(t.detach() > 0.5, 0.1).cos() @ w,
        "bias": lambda t: F.linear(t.sin(), w, cos).cos() @ w,
        "zeros": lambda t: (torch.zeros(64, 64) * t).cos() @ w,
    }[kind]
    expected = torch.autograd.grad(function(x).sum(), [x, w])

    def run():
        return sac_policies.checkpoint(function, x, policy=sac_policies.recompute_all())

    run().sum().backward()  # first uses are not the subject
    with Storages() as made:
        out = run()
    # What guards parameters is not of the region's making, and small.
    assert made.alive_bytes() < out.nbytes * 1.5
    assert all(map(torch.equal, torch.autograd.grad(out.sum(), [x, w]), expected))


@pytest.mark.parametrize("function", [_attended, _differentiated])
@pytest.mark.parametrize("thread", ["one thread", "a thread for backward"])
def test_region_inside_a_checkpoint(function, thread):
    """Attention, and a gradient inside, in a region that torch's checkpoint runs again: twice.

    A thread numbers its nodes for itself, and an accelerator's backward has a thread of its own.
    """
    x = leaf(1, 8, 16)

    def region(t):
        return sac_policies.checkpoint(function, t, policy=sac_policies.recompute_all())

    expected = torch.autograd.grad(function(x.exp()).square().sum(), x)[0]
    for _ in range(2):
        out = checkpoint(region, x.exp(), use_reentrant=False)
        with ThreadPoolExecutor(1) as other:
            backward = partial(torch.autograd.grad, out.square().sum(), x)
            found = backward() if thread == "one thread" else other.submit(backward).result()
        assert torch.equal(found[0], expected)
