"""Other code reaches a wrapped module's state through its wrapper."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils import prune

from ckpt_wrap import checkpoint_wrapper


def test_prune_and_functional_call_work_through_a_wrapper():
    """Code that reaches into a module's parameters finds them at the wrapper."""
    model = nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2)))
    zeros = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    x = torch.ones(1, 2)
    assert not torch.func.functional_call(model, zeros, (x,)).any()
    assert model(x).any()
    prune.l1_unstructured(model[0], "weight", amount=0.5)
    model(x).sum().backward()
    assert model[0].weight_orig.grad is not None
