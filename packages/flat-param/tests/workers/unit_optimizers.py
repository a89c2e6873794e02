"""Hooks of parameters, optimizers, norms and orders of units; one check per claim."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from _harness import batches, loss_of, plain, sharded, share, stepping, whole_state
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


def check_state_from_before_sharding_is_cut(rank: int, world: int) -> None:
    """Where the optimizer stepped before the parameters were divided, it steps on as before."""
    makers: tuple[Any, ...] = (
        partial(torch.optim.SGD, lr=1.0, momentum=0.5),
        partial(torch.optim.SGD, lr=1.0, momentum=0.5, fused=True),
        stepping(lambda param, state, _: param.sub_(state.setdefault("first", param.grad.clone()))),
    )
    for make in makers:
        torch.manual_seed(0)
        reference, module = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        module.load_state_dict(reference.state_dict())
        optimizers = [make(each.parameters()) for each in (reference, module)]
        for step in range(3):
            for each, optimizer in zip((reference, module), optimizers, strict=True):
                optimizer.zero_grad()
                each(torch.full((1, 4), 0.1 + step)).sum().backward()
                optimizer.step()
            if not step:
                optimizers[1].zero_grad()
                fully_shard(module)
        assert torch.equal(whole_state(module)["weight"], reference.weight)


def check_hooks_are_told_once_of_each_sum(rank: int, world: int) -> None:
    """Registered before or after; not inside no_sync; not when removed; not when unused."""
    model, told = plain(), []
    model.head.bias.register_post_accumulate_grad_hook(lambda param: told.append("before"))
    for block in model.blocks:
        flat_param.fully_shard(block)
    flat_param.fully_shard(model)
    model.head.weight.register_post_accumulate_grad_hook(
        lambda param: told.append(param is model.head.weight and param.grad is not None)
    )
    model.blocks[0].unused.weight.register_post_accumulate_grad_hook(lambda _: told.append("idle"))
    model.head.bias.register_post_accumulate_grad_hook(lambda _: told.append("gone")).remove()
    (ids,) = batches(world, 1)
    with model.no_sync():
        loss_of(model, share(ids, rank)).backward()
    assert told == []
    loss_of(model, share(ids, rank)).backward()
    assert sorted(map(str, told)) == ["True", "before"]


def check_gradient_hooks_are_refused(rank: int, world: int) -> None:
    """A hook of `register_hook` would never be called."""
    for model in (sharded(boundary="tensor"), sharded()):
        with pytest.raises(
            flat_param.ParameterError, match=r"'head\.weight' of .* has a hook of regis"
        ):
            model.head.weight.register_hook(lambda grad: 2 * grad)
    model = plain()
    model.head.weight.register_hook(lambda grad: 2 * grad)
    with pytest.raises(flat_param.ParameterError, match=r"'head\.weight' has a hook of regis"):
        flat_param.fully_shard(model)


def check_units_in_another_order_are_named_on_every_rank(rank: int, world: int) -> None:
    """Blocks of one shape change places on one rank: an error before any gradient is there."""
    model, (ids,) = sharded(), batches(world, 1)
    loss_of(model, share(ids, rank)).backward()
    model.zero_grad()
    model.order = (1, 0, 2) if rank else (0, 1, 2)
    with pytest.raises(flat_param.CommError) as caught:
        loss_of(model, share(ids, rank)).backward()
    assert str(caught.value).startswith(
        "flat_param.fully_shard: rank 0 did all_gather of unit 'blocks.1' where rank 1 did "
        "all_gather of unit 'blocks.0', but all ranks must run the same units in the same order."
    )
    assert all(param.grad is None for param in model.parameters())
    model.order = (0, 1, 2)
    loss_of(model, share(ids, rank)).backward()
    assert model.head.weight.grad is not None
