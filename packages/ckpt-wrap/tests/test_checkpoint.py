"""What runs where one call of a checkpointed module is made: the table of `_checkpoint`."""

from __future__ import annotations

import contextlib
import weakref

import pytest
import torch
from torch import nn

from ckpt_wrap import RecomputeError, checkpoint_


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_nothing_is_done_where_gradients_are_off(wrap, context, monkeypatch):
    """The module just runs, without hooks."""
    module = wrap(nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
    monkeypatch.setattr("ckpt_wrap.checkpointing._checkpoint.capture", None)
    monkeypatch.setattr("ckpt_wrap.checkpointing._checkpoint.checkpoint_reentrant", None)
    with context():
        assert not module(torch.ones(1, 2)).requires_grad


def test_nothing_is_kept_where_nothing_requires_grad(wrap):
    """Not even the inputs, which hooks around the call would see."""
    module = wrap(nn.Sequential(nn.Linear(2, 2), nn.Tanh())).requires_grad_(False)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(packed.append, lambda t: t):
        result = module(x := torch.ones(1, 2))
    assert not result.requires_grad
    assert not packed
    gone = weakref.ref(x)
    del x
    assert gone() is None


def test_torch_func_differentiates_through(wrap):
    """`torch.func.grad` and `vmap` of it give autograd's gradients."""
    module = wrap(nn.Sequential(nn.Linear(3, 3), nn.Tanh()))
    x = torch.randn(4, 3, requires_grad=True)
    module(x).sum().backward()
    slope = torch.func.grad(lambda t: module(t).sum())
    torch.testing.assert_close(slope(x.detach()), x.grad)
    torch.testing.assert_close(torch.func.vmap(slope)(x.detach()), x.grad)


def test_a_context_that_suppresses_the_modules_exception_is_an_error(block_class):
    """There would be no result to return."""
    module = checkpoint_(
        block_class(),
        context_fn=lambda: (contextlib.suppress(RuntimeError), contextlib.nullcontext()),
    )
    with pytest.raises(RecomputeError, match="suppressed an exception"):
        module(torch.randn(2, 5, requires_grad=True))
