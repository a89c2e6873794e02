"""What runs where one call of a checkpointed module is made: the table of `_checkpoint`."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import set_checkpoint_debug_enabled

from ckpt_wrap import checkpoint_


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
