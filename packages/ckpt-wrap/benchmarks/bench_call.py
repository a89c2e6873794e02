"""What does a wrapped call cost, over the bare module and beside torch's wrapper?"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as torchs

from ckpt_wrap import checkpoint_, checkpoint_wrapper


@pytest.fixture
def calls():
    """The same `Linear(8, 8)` four ways, and what each saves."""
    bare = nn.Linear(8, 8)
    x = torch.randn(2, 8, requires_grad=True)
    modules = {
        "bare": bare,
        "in place": checkpoint_(copy.deepcopy(bare)),
        "nested": checkpoint_wrapper(copy.deepcopy(bare)),
        "torch's wrapper": torchs.checkpoint_wrapper(copy.deepcopy(bare)),
    }
    for name, module in modules.items():
        packed = []
        with saved_tensors_hooks(lambda t, seen=packed: seen.append(t) or t, lambda t: t):
            module(x)
        print(f"{name}: {len(packed)} tensors kept by the call")
    return modules, x


def test_no_grad_call(calls, side_by_side, figure):
    """With gradients off: at most 0.5 us in place and 2.5 us nested over the bare module."""
    modules, x = calls
    with torch.no_grad():
        took = side_by_side({n: lambda m=m: m(x) for n, m in modules.items()})
    figure("in place, us over bare", took["in place"] - took["bare"], must=0.5)
    figure("nested, us over bare", took["nested"] - took["bare"], must=2.5)


def test_grad_forward(calls, side_by_side, figure):
    """With gradients on: at most 1.15 times torch's wrapper; the aim is 1."""
    modules, x = calls
    took = side_by_side({n: lambda m=m: m(x) for n, m in modules.items()})
    figure("in place over torch's", took["in place"] / took["torch's wrapper"], must=1.15)


def test_forward_and_backward(calls, side_by_side):
    """A whole step."""
    modules, x = calls
    side_by_side({n: lambda m=m: m(x).sum().backward() for n, m in modules.items()}, number=100)


def test_attribute_access(calls, side_by_side, figure):
    """Reading an attribute: at most 1.2 times the bare module's in place."""
    modules, _ = calls
    took = side_by_side({n: lambda m=m: m.in_features for n, m in modules.items()}, number=3000)
    figure("in place over bare", took["in place"] / took["bare"], must=1.2)
