"""Values whose operands autograd did not save: sums, concatenations, saved results."""

from __future__ import annotations

import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from torchparts_conformance import requirement

from .test_changes import Fresh

aten = torch.ops.aten


class Storages(TorchDispatchMode):
    """Notes every storage that is made, and counts operators."""

    def __init__(self):
        super().__init__()
        self.made = []
        self.products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.products += func is aten.mm.default
        if isinstance(out, torch.Tensor):
            self.made.append(weakref.ref(out.untyped_storage()))
        return out

    def alive_bytes(self):
        """Bytes of those that somebody has."""
        alive = {id(each): each for each in (ref() for ref in self.made) if each is not None}
        return sum(each.nbytes() for each in alive.values())


def leaf(device, *shape):
    """Spread values of one shape that need a gradient."""
    numel = torch.Size(shape).numel()
    return torch.linspace(-1.3, 1.7, numel, device=device).reshape(shape).requires_grad_()


def _rotated(t, cos, sin):
    left, right = t.chunk(2, -1)
    return t * cos + torch.cat([-right, left], -1) * sin


@requirement(
    "SP-153",
    level="MUST",
    text=(
        "Where nothing is to be kept, a region whose values are rebuilt operator by operator "
        "MUST keep no sum, concatenation or product with a constant, and no result that a node "
        "saves for its own backward, of operands it can have again."
    ),
    rationale=(
        "the residual sums, rotated queries and activations of a transformer are a quarter of "
        "what it saves; none of their nodes saves the operands"
    ),
    since="0.1.0",
    profile="replay",
)
@pytest.mark.parametrize("kind", ["residual", "rotary", "tanh", "softmax"])
def test_nothing_is_kept_of_what_can_be_rebuilt(part, device, kind):
    """A residual sum, a rotation, and results that nodes save: only the output is there."""
    x, w = leaf(device, 64, 64), leaf(device, 64, 64)
    cos, sin = (torch.linspace(0, 1, 64, device=device).add(each).cos() for each in (0, 1))
    function = {
        "residual": lambda t: (t + t.sin()).cos() @ w,
        "rotary": lambda t: _rotated(t.sin(), cos, sin) @ w,
        "tanh": lambda t: (t @ w).tanh() @ w,
        "softmax": lambda t: (t @ w).softmax(-1) @ w,
    }[kind]
    expected = torch.autograd.grad(function(x).sum(), [x, w])

    def run():
        return part.checkpoint(function, x, policy=part.recompute_all())

    run().sum().backward()  # first uses are not the subject
    with Storages() as made:
        out = run()
    # What guards parameters is not of the region's making, and small.
    assert made.alive_bytes() < out.nbytes * 1.5
    assert all(map(torch.equal, torch.autograd.grad(out.sum(), [x, w]), expected))


@requirement(
    "SP-154",
    level="MUST",
    text=(
        "A value rebuilt from operands that autograd did not save MUST be the one of the "
        "forward, or its reader MUST be refused: gradients are bitwise those of no "
        "checkpointing, or an error."
    ),
    rationale=(
        "what becomes of such an operand after the forward, past its version counter, is seen "
        "by nobody else"
    ),
    since="0.1.0",
    profile="replay",
)
@pytest.mark.parametrize("size", [4, 96])
def test_value_is_rebuilt_as_it_was_or_refused(part, device, size):
    """A parameter that a sum read has other data before backward: no gradient of that."""
    x, w = leaf(device, size, size), leaf(device, size, size)

    def function(t, weights):
        return (t + weights[0]).sin()

    expected = torch.autograd.grad(function(x, [w]).sum(), x)
    out = part.checkpoint(Fresh(function), x, [w], policy=part.recompute_all())
    w.data[0, 1] += 0.5
    try:
        found = torch.autograd.grad(out.sum(), x)
    except RuntimeError:
        return
    assert torch.equal(found[0], expected[0])


@requirement(
    "SP-108",
    level="MUST",
    text=(
        "The function MUST be called once, and an operator that the policy saves MUST NOT run "
        "again in backward."
    ),
    rationale="no second forward is the purpose of a replay",
    since="0.1.0",
    profile="replay",
)
def test_saved_product_behind_a_sum_runs_once(part, device):
    """The sum is kept in its place, or the product is: it does not run again."""
    x, w = leaf(device, 5, 4), leaf(device, 4, 4)
    calls = []

    def function(t):
        calls.append(1)
        return (t @ w + t).sin()

    out = part.checkpoint(function, x, policy=part.save_ops("aten.mm"))
    with Storages() as backward:
        out.sum().backward()
    assert calls == [1]
    assert backward.products == 2


def _attended(t):
    """Attention saves its result; of the sum only the operands are there."""
    query, key, value = (each.unsqueeze(0) for each in (t, t.sin(), t.cos()))
    return F.scaled_dot_product_attention(query, key, value).squeeze(0) + t


def _differentiated(t):
    made = (t + t).sin()
    (inner,) = torch.autograd.grad(made.sum(), t, retain_graph=True)
    return made * inner.detach()


@requirement(
    "SP-155",
    level="MUST",
    text=(
        "A region inside a checkpoint, which runs it again, MUST give the gradients of no "
        "checkpointing, bit by bit: where nodes in it save their results, and where a gradient "
        "is taken in it."
    ),
    rationale=(
        "reproduced: torch's checkpoint gives back each tensor once, and what the first run "
        "kept is not for the second"
    ),
    since="0.1.0",
    profile="replay",
)
@pytest.mark.parametrize("function", [_attended, _differentiated])
@pytest.mark.parametrize("thread", ["one thread", "a thread for backward"])
def test_region_inside_a_checkpoint(part, device, function, thread):
    """Attention, and a gradient inside, in a region that torch's checkpoint runs again: twice.

    A thread numbers its nodes for itself, and an accelerator's backward has a thread of its own.
    """
    x = leaf(device, 1, 8, 16)

    def region(t):
        return part.checkpoint(function, t, policy=part.recompute_all())

    expected = torch.autograd.grad(function(x.exp()).square().sum(), x)[0]
    for _ in range(2):
        out = checkpoint(region, x.exp(), use_reentrant=False)
        with ThreadPoolExecutor(1) as other:
            backward = partial(torch.autograd.grad, out.square().sum(), x)
            found = backward() if thread == "one thread" else other.submit(backward).result()
        assert torch.equal(found[0], expected)
