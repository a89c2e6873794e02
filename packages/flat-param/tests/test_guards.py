"""The guards leave other tensors alone, and speak up where torch's norm cannot be wrapped."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from flat_param import ParameterError, fully_shard
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


def test_clipping_cut_gradients_is_refused_without_the_wrapped_norm() -> None:
    """The fallback names the parameter and does not clip."""
    param = nn.Parameter(torch.ones(2))
    param.grad = torch.ones(2)
    clip = _guards._refuse_cut_grads(nn.utils.clip_grad_norm_)
    assert torch.isclose(clip([param], 1.0), torch.tensor(2.0).sqrt())
    _guards.mark_param(param, name="head.weight", world_size=2)
    before = param.grad.clone()
    with pytest.raises(ParameterError, match=r"'head.weight' is spread over 2 ranks"):
        clip([param], 0.1)
    assert torch.equal(param.grad, before)


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


def test_scaling_cut_gradients_is_refused_without_the_wrapped_search() -> None:
    """The fallback names the parameter and does not step; other models are stepped."""
    step = _guards._refuse_to_scale(lambda scaler, optimizer: optimizer.step())
    param = nn.Parameter(torch.ones(2))
    param.grad = torch.ones(2)
    optimizer = torch.optim.SGD([param], lr=1.0)
    step(None, optimizer)
    assert torch.equal(param.detach(), torch.zeros(2))
    _guards.mark_param(param, name="w", world_size=2)
    text = "'w' is spread over 2 ranks, but this torch's GradScaler would look for an overflow"
    with pytest.raises(ParameterError, match=text):
        step(None, optimizer)
    assert torch.equal(param.detach(), torch.zeros(2))


def test_gradients_that_are_handed_out_are_of_what_was_asked_for() -> None:
    """`torch.autograd.grad` says that a sharded parameter is not in the graph."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = fully_shard(nn.Linear(3, 3))
        with pytest.raises(RuntimeError, match="not have been used in the graph"):
            torch.autograd.grad(model(torch.ones(2, 3)).sum(), list(model.parameters()))
    finally:
        dist.destroy_process_group()
