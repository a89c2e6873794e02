"""How long a value is there that was made again: until its last reader has had it."""

from __future__ import annotations

import weakref

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from torchparts_conformance import requirement


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


def leaf(device, *shape):
    """Spread values of one shape that need a gradient."""
    numel = torch.Size(shape).numel()
    return torch.linspace(-1.3, 1.7, numel, device=device).reshape(shape).requires_grad_()


def replay(part, function, *args):
    """Call a region that keeps as little as the engine can."""
    return part.checkpoint(function, *args, policy=part.recompute_all())


@requirement(
    "SP-104",
    level="MUST",
    text=(
        "A value that several operators read MUST be replayed once in a backward, and be "
        "dropped with its last reader, or when backward ends without one."
    ),
    rationale="without sharing, silu ran 8 times instead of 4 in the reference stack",
    since="0.1.0",
    profile="replay",
)
def test_what_an_in_place_operator_reads_is_replayed_once(part, device):
    """The graph saves a copy of what was written to, for the operator and for its replay."""
    x = leaf(device, 5, 4)

    def function(t):
        y = F.silu(t)
        y /= t.exp()
        return (y + t).sin()

    out = replay(part, function, x)
    with Made() as made:
        out.sum().backward()
    assert len(made.storages) == 1


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


@requirement("SP-104")
def test_what_a_function_was_given_is_dropped_before_backward_ends(part, device):
    """Its own node reads it, and so does whatever makes its output again; nobody else."""
    x, w = leaf(device, 5, 4), leaf(device, 4, 4)
    given, alive = x * 2, []
    given.register_hook(lambda grad: alive.extend(each() for each in made.storages))
    out = replay(part, lambda t: Cubed.apply(F.silu(t)) @ w, given)
    with Made() as made:
        out.sum().backward()
    assert all(each is None for each in alive)
