"""The guards leave other tensors alone."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from flat_param import fully_shard
from flat_param.sharded import _guards


def test_norm_of_plain_gradients_is_torchs_own() -> None:
    """Without marks the wrapped function is called as it was."""
    calls = []

    def original(*args: object) -> torch.Tensor:
        calls.append(args)
        return torch.tensor(3.0)

    grads = [torch.ones(2)]
    assert _guards._over_ranks(original)(grads, 1.0, True, False) == 3.0
    assert calls == [(grads, 1.0, True, False)]


def test_steps_of_sharded_parameters_are_counted_alone() -> None:
    """Fused ones too, which no version counter tells; not those of other models."""
    _guards.install_guards()
    mine, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    _guards.mark_param(mine, name="w", world_size=2)
    counted = []
    for params in ([other], [other, mine]):
        for param in params:
            param.grad = torch.ones(2)
        before = _guards.optimizer_steps()
        torch.optim.SGD(params, lr=1.0, fused=True).step()
        counted.append(_guards.optimizer_steps() - before)
    assert counted == [0, 1]


def test_gradients_that_are_handed_out_are_of_what_was_asked_for() -> None:
    """`torch.autograd.grad` says that a sharded parameter is not in the graph."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = fully_shard(nn.Linear(3, 3))
        with pytest.raises(RuntimeError, match="not have been used in the graph"):
            torch.autograd.grad(model(torch.ones(2, 3)).sum(), list(model.parameters()))
    finally:
        dist.destroy_process_group()
