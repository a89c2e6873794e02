"""What changes between a region's forward and backward, seen from outside."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sac_policies


def leaf(*shape):
    """Spread values of one shape that need a gradient."""
    numel = torch.Size(shape).numel()
    return torch.linspace(-1.3, 1.7, numel).reshape(shape).requires_grad_()


def add_unseen(tensor):
    """Write past the version counter."""
    tensor.data.add_(0.5)


def replace_data(tensor):
    """Give the tensor other data."""
    tensor.data = tensor.data * 2


class Fresh(nn.Module):
    """Wrap a function anew, so that its next region is a first step."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        """Call it."""
        return self.function(*args)


def is_seen_or_harmless(checkpoint, make, change):
    """Change each parameter and the input in turn between forward and backward.

    Gradients are those of no checkpointing, or a change is an error; without one they are always.
    """
    for at in range(1 + len(list(make()[0].parameters()))):
        found = []
        for checkpointed in (False, True):
            torch.manual_seed(0)
            layer, shape = make()
            layer, x = layer, leaf(*shape)

            def function(t, layer=layer):
                return F.silu(layer(t)).sin()

            out = checkpoint(Fresh(function), x) if checkpointed else function(x)
            leaves = [*layer.parameters(), x]
            if change is not None:
                change(leaves[at])
            try:
                found.append(torch.autograd.grad(out.sum(), leaves))
            except RuntimeError:
                assert checkpointed
                assert change is not None
                found.append(found[0])
        assert all(map(torch.equal, *found))


class Cache:
    """Grows, counts, and has a buffer that is written in place."""

    def __init__(self):
        self.keys = []
        self.count = 0
        self.buffer = torch.zeros(8, 4)


def grow(t, w, cache):
    """Append to a list."""
    cache.keys.append(t @ w)
    cache.count += 1
    return torch.cat(cache.keys).sin() * cache.count


def write(t, w, cache):
    """Write to a buffer."""
    cache.buffer[cache.count : cache.count + 4] = t @ w
    cache.count += 4
    return cache.buffer.sin().exp()


class EverySecond(nn.Module):
    """Its weight is every second column of a larger one."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 48).view(4, 12)[:, ::2])

    def forward(self, x):
        """Multiply."""
        return x @ self.weight


@pytest.mark.parametrize("change", [None, add_unseen, replace_data])
@pytest.mark.parametrize(
    "make",
    [
        lambda: (nn.Linear(6, 6), (4, 6)),
        lambda: (nn.Linear(96, 96), (4, 96)),
        lambda: (nn.LayerNorm(6), (4, 6)),
        lambda: (nn.GroupNorm(2, 4), (2, 4, 5)),
        lambda: (nn.Conv1d(4, 4, 3), (2, 4, 6)),
        lambda: (EverySecond(), (3, 4)),
    ],
)
def test_leaf_is_changed_past_its_version_counter(make, change):
    """Each parameter and the input in turn; plain autograd gives gradients for all of them."""

    def checkpoint(*call):
        return sac_policies.checkpoint(*call, policy=sac_policies.recompute_all())

    is_seen_or_harmless(checkpoint, make, change)


@pytest.mark.parametrize("function", [grow, write])
def test_cache_that_the_region_around_holds(function):
    """The region inside is given the cache, the one around closes over it."""
    results = []
    for checkpointed in (False, True):
        x, w, cache = leaf(4, 4), leaf(4, 4), Cache()

        def region(called, *args, checkpointed=checkpointed):
            if not checkpointed:
                return called(*args)
            return sac_policies.checkpoint(called, *args, policy=lambda *call, **kwargs: False)

        def around(t, w=w, cache=cache, region=region):
            return region(function, t.cos(), w, cache) @ w

        out = region(around, x * 1.0)
        content = [len(cache.keys), cache.count]
        results.append(torch.autograd.grad(out.square().sum(), [x, w]))
        assert [len(cache.keys), cache.count] == content
    assert all(map(torch.equal, *results))
