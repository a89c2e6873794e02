"""A backward inside another one: each notices what it reads."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sac_policies


def leaf(*shape):
    """Spread values of one shape that need a gradient."""
    numel = torch.Size(shape).numel()
    return torch.linspace(-1.3, 1.7, numel).reshape(shape).requires_grad_()


def add_unseen(tensor):
    """Write past the version counter."""
    tensor.data.add_(0.5)


class Fresh(nn.Module):
    """Wrap a function anew, so that its next region is a first step."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        """Call it."""
        return self.function(*args)


def _with_bias(t, given):
    return (t + given[0]).sin()


def _or_refusal(call):
    """What a backward gives, or what its error says."""
    try:
        return call()[0]
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("size", [4, 96])
@pytest.mark.parametrize("changed", [None, "read before", "read after", "read inside"])
def test_change_is_noticed_by_the_backward_that_reads_it(changed, size):
    """A hook between two regions runs the backward of a third; each adds something it was given."""
    x, y = leaf(size, size), leaf(size, size)
    given = {which: leaf(size, size) for which in ("before", "after", "inside")}
    inner = []

    def run(t, which, checkpointed):
        if not checkpointed:
            return _with_bias(t, [given[which]])
        policy = sac_policies.recompute_all()
        return sac_policies.checkpoint(Fresh(_with_bias), t, [given[which]], policy=policy)

    def backward(checkpointed, change=None):
        inside = run(y, "inside", checkpointed).sum()

        def hook(grad):
            inner.append(_or_refusal(lambda: torch.autograd.grad(inside, y)))

        between = run(x, "after", checkpointed)
        between.register_hook(hook)
        out = run(between, "before", checkpointed).sum()
        if change is not None:
            add_unseen(given[change])
        return _or_refusal(lambda: torch.autograd.grad(out, x))

    expected = [backward(checkpointed=False), *inner]
    inner.clear()
    found = [backward(True, changed and changed.split()[1]), *inner]
    refused = [isinstance(each, str) for each in found]
    assert refused[0] or len(found) == 2
    assert not refused[0] or changed in ("read before", "read after")
    assert not any(refused[1:]) or changed == "read inside"
    for each, plain in zip(found, expected, strict=False):
        if isinstance(each, str):
            assert "aten.add" in each or "aten.sin" in each, each
        else:
            assert torch.equal(each, plain)
