"""What runs where one call of a checkpointed module is made: the table of `_checkpoint`."""

from __future__ import annotations

import contextlib
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import set_checkpoint_debug_enabled, set_checkpoint_early_stop

from ckpt_wrap import checkpoint_
from ckpt_wrap._checkpoint import Checkpoint
from ckpt_wrap._options import CheckpointOptions


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_nothing_is_done_where_gradients_are_off(wrap, context, monkeypatch):
    """The module just runs, without hooks."""
    module = wrap(nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
    monkeypatch.setattr("ckpt_wrap._checkpoint.Call", None)
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


def _frozen():
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).requires_grad_(False)


def test_contexts_are_not_entered_where_nothing_requires_grad():
    """They may keep what nobody needs."""
    made = []

    def contexts():
        made.append(1)
        return contextlib.nullcontext(), contextlib.nullcontext()

    module = checkpoint_(_frozen(), context_fn=contexts)
    module(torch.ones(3, 2))
    assert not made
    module(torch.ones(3, 2, requires_grad=True))
    assert made == [1]


@pytest.mark.parametrize("override", [True, False])
def test_torchs_settings_go_before_options(override):
    """As in torch: whether to stop early, and whether to debug."""
    runs = []

    class Layer(nn.Linear):
        def forward(self, x):
            runs.append("begins")
            y = torch.tanh(super().forward(x))
            runs.append("ends")
            return y

    module = checkpoint_(Layer(2, 2), early_stop=not override)
    with set_checkpoint_early_stop(override):
        loss = module(torch.ones(1, 2, requires_grad=True)).sum()
    loss.backward()
    assert runs == ["begins", "ends", "begins", *([] if override else ["ends"])]


@pytest.mark.parametrize("option", [True, False])
def test_torchs_debugging_goes_before_the_option(option, monkeypatch):
    """On and off."""
    taken = []
    monkeypatch.setattr(
        "ckpt_wrap._checkpoint._with_debug",
        lambda call, args, kwargs: taken.append(1),
    )
    module, x = checkpoint_(nn.Linear(2, 2), debug=option), torch.ones(1, 2, requires_grad=True)
    with set_checkpoint_debug_enabled(not option):
        module(x)
    assert bool(taken) is not option
    taken.clear()
    module(x)
    assert bool(taken) is option


def test_a_function_that_is_no_modules_is_checkpointed_as_well():
    """Its tensors are inputs, and what it finds elsewhere is recomputed."""
    weight = torch.ones(2, requires_grad=True)
    runs = []

    def scaled(x, *, options):
        runs.append(options)
        return torch.tanh(x * weight)

    checkpoint = Checkpoint(CheckpointOptions())
    checkpoint(scaled, torch.ones(2), options="mine").sum().backward()
    assert runs == ["mine", "mine"]
    assert torch.equal(weight.grad, torch.autograd.grad(torch.tanh(weight).sum(), weight)[0])
