"""Optimizers and norms over a unit's shards, beside whole tensors; one check per claim."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from _harness import (
    batches,
    distance,
    loss_of,
    options_of,
    plain,
    raises,
    run_checks,
    sharded,
    share,
    whole_state,
)
from _whole import same_grads
from torch import nn

import flat_param
from flat_param import fully_shard


def check_rank_without_gradients_joins_the_norm(rank: int, world: int) -> None:
    """One tensor that is not cut is on one rank; the other has nothing, and knows the norm."""
    model = fully_shard(nn.Linear(4, 4, bias=False), boundary="tensor")
    model(torch.ones(2, 4)).sum().backward()
    assert model.clip_grad_norm_(1.0) == 8.0
    model.zero_grad()
    assert model.clip_grad_norm_(1.0) == 0.0


def check_clipping_knows_all_ranks(rank: int, world: int) -> None:
    """Clipping knows all ranks."""
    (ids,) = batches(world, 1)
    for norm_type in (1.0, 2.0, float("inf")):
        reference, model, other = plain(), sharded(), sharded(**options_of("replicated"))
        loss_of(reference, ids).backward()
        expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.1, norm_type)
        for module in (model, other):
            loss_of(module, share(ids, rank)).backward()
            got = module.clip_grad_norm_(0.1, norm_type)
            assert torch.allclose(got, expected, rtol=1e-5), (norm_type, got, expected)
            same_grads(module, reference)


def check_optimizer_made_before_still_trains(rank: int, world: int) -> None:
    """Optimizer made before still trains."""
    model, reference = plain(), plain()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    fully_shard(model)
    (ids,) = batches(world, 1)
    loss_of(model, share(ids, rank)).backward()
    loss_of(reference, ids).backward()
    for optimizer in optimizers:
        optimizer.step()
    assert distance(whole_state(model), whole_state(reference)) < 1e-6


class _Foreign(torch.optim.Optimizer):
    """A custom optimizer; keeps the gradient of the first step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            self.state[param].setdefault("moment", param.grad)


def check_state_of_whole_parameters_is_not_stepped_over_pieces(rank: int, world: int) -> None:
    """Where the optimizer stepped before the parameters were divided; nothing changes."""
    makers: tuple[Any, ...] = (
        partial(torch.optim.SGD, lr=1.0, momentum=0.5),
        partial(torch.optim.SGD, lr=1.0, momentum=0.5, fused=True),
        _Foreign,
    )
    for make in makers:
        module = nn.Linear(4, 4, bias=False)
        optimizer = make(module.parameters())
        module(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        fully_shard(module)
        module(torch.ones(1, 4)).sum().backward()
        before = whole_state(module)
        key = "moment" if make is _Foreign else "momentum_buffer"
        text = f"'{key}' of parameter 'weight' has shape (4, 4)"
        raises(flat_param.StateError, text, optimizer.step)
        assert distance(whole_state(module), before) == 0


if __name__ == "__main__":
    run_checks(globals())
