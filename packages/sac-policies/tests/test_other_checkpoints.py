"""`context_fn` in a checkpoint that is not torch's, alone and in regions inside regions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from sac_policies import MATMULS, context_fn, recompute_all, save_all, save_ops


class _Checkpoint:
    """The least that a checkpoint does: hooks, then the forward's mode, and the same again."""

    def __init__(self, function: Callable[..., Any], fn: Callable[[], Any]) -> None:
        self.function, self.fn = function, fn

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        run = _Run(self.function, self.fn(), x)
        with saved_tensors_hooks(run.pack, run.unpack), run.forward:
            return self.function(x)


class _Run:
    def __init__(self, function: Callable[..., Any], modes: Any, x: torch.Tensor) -> None:
        self.function, (self.forward, self.recompute) = function, modes
        self.x, self.packed = x, 0
        self.values: list[torch.Tensor] = []

    def pack(self, tensor: torch.Tensor) -> tuple[int, Any]:
        self.packed += 1
        return self.packed - 1, (tensor.shape, tensor.dtype)

    def unpack(self, held: tuple[int, Any]) -> torch.Tensor:
        at, metadata = held
        if not self.values:
            x = self.x.detach().requires_grad_(self.x.requires_grad)
            with saved_tensors_hooks(self.again, lambda t: t), torch.enable_grad(), self.recompute:
                self.function(x)
            assert len(self.values) == self.packed
        assert (self.values[at].shape, self.values[at].dtype) == metadata
        return self.values[at]

    def again(self, tensor: torch.Tensor) -> torch.Tensor:
        self.values.append(tensor.detach())
        return self.values[-1]


_POLICIES = {
    "products": save_ops(MATMULS),
    "all": save_all(),
    "none": recompute_all(),
    "tanh": save_ops("aten.tanh"),
}


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("outer", _POLICIES)
@pytest.mark.parametrize("inner", _POLICIES)
def test_regions_inside_regions_of_another_checkpoint(inner, outer, needs_grad, equal):
    """What is kept does not go through the hooks of the checkpoint around."""
    results = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        layers = [nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)]
        x = torch.linspace(-1, 1, 32).view(4, 8).requires_grad_(needs_grad)

        def innermost(t, layers=layers):
            return layers[0](t).tanh()

        first = _Checkpoint(innermost, context_fn(_POLICIES[inner])) if checkpointed else innermost

        def middle(t, layers=layers, first=first):
            return layers[1](first(t)).tanh()

        second = _Checkpoint(middle, context_fn(_POLICIES[outer])) if checkpointed else middle

        def whole(t, layers=layers, second=second):
            return layers[2](second(t)).tanh()

        third = _Checkpoint(whole, context_fn(_POLICIES[inner])) if checkpointed else whole
        wanted = [p for layer in layers for p in layer.parameters()] + [x] * needs_grad
        results.append(torch.autograd.grad(third(x).square().sum(), wanted))
    assert equal(*results)


def test_hooks_of_the_user_around_another_checkpoint_are_still_used():
    """Only the checkpoint's own hooks are left out: the user's take what is kept."""
    packed = []

    def pack(tensor):
        packed.append(tensor.shape)
        return tensor

    layer, x = nn.Linear(8, 3), torch.ones(4, 8)

    def function(t):
        with saved_tensors_hooks(pack, lambda held: held):
            return _Checkpoint(lambda u: layer(u).tanh(), context_fn(save_ops(MATMULS)))(t)

    _Checkpoint(function, context_fn(recompute_all()))(x).sum().backward()
    assert (4, 3) in packed
