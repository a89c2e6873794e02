"""What torch's wrapper documents as limits, and this one does not have."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from ckpt_wrap import CheckpointImpl, checkpoint_wrapper


class Nested(nn.Module):
    """Takes a tensor in a list and returns one in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, tensors):
        """Call the layer."""
        return {"out": torch.tanh(self.linear(tensors[0])), "n": 1}


def test_reentrant_nested_tensors_get_gradients():
    plain = Nested()
    wrapped = checkpoint_wrapper(copy.deepcopy(plain), CheckpointImpl.REENTRANT)
    x = torch.randn(3, 4, requires_grad=True)
    grads = []
    for module in (plain, wrapped):
        x.grad = None
        module([x, "other"])["out"].sum().backward()
        grads.append((x.grad, module.get_parameter("linear.weight").grad))
    assert all(map(torch.equal, *grads))


def test_reentrant_parameters_get_gradients_without_input_gradients():
    plain = nn.Linear(4, 4)
    wrapped = checkpoint_wrapper(copy.deepcopy(plain), CheckpointImpl.REENTRANT)
    x = torch.randn(3, 4)
    for module in (plain, wrapped):
        module(x).sum().backward()
    assert torch.equal(plain.weight.grad, wrapped.weight.grad)


@pytest.mark.parametrize("impl", list(CheckpointImpl))
def test_batch_norm_statistics_advance_once_per_step(impl):
    plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())
    inner = copy.deepcopy(plain)
    x = torch.randn(8, 4, requires_grad=True)
    for module in (plain, checkpoint_wrapper(inner, impl)):
        for _ in range(2):
            module(x).sum().backward()
    assert all(map(torch.equal, plain.buffers(), inner.buffers()))
