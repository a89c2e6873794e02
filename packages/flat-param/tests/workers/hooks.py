"""Hooks of parameters, norms by torch's functions, and orders of units, on two ranks."""

from __future__ import annotations

import pytest
import torch
from _harness import (
    batches,
    loss_of,
    plain,
    run_checks,
    sharded,
    share,
)
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm  # before anything is sharded

import flat_param


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
    """A hook of `register_hook` would never be called; no gradient is handed out."""
    (ids,) = batches(world, 1)
    for model in (sharded(boundary="tensor"), sharded()):
        handle = model.head.weight.register_hook(lambda grad: 2 * grad)
        with pytest.raises(flat_param.ParameterError, match=r"'head\.weight' has a hook of regis"):
            loss_of(model, share(ids, rank)).backward()
        assert all(param.grad is None for param in model.parameters())
        handle.remove()
        loss_of(model, share(ids, rank)).backward()


def check_torchs_total_norm_is_of_all_ranks(rank: int, world: int) -> None:
    """The functions that were imported before anything was sharded are right, too."""
    (ids,) = batches(world, 1)
    reference, model = plain(), sharded()
    loss_of(reference, ids).backward()
    loss_of(model, share(ids, rank)).backward()
    grads = [[p.grad for p in m.parameters() if p.grad is not None] for m in (reference, model)]
    for order in (2.0, 1.0, float("inf")):
        expected, found = (get_total_norm(each, order) for each in grads)
        assert torch.isclose(found, expected), (order, found, expected)
    clip_grads_with_norm_(model.parameters(), 0.01, get_total_norm(grads[1]))
    assert torch.isclose(get_total_norm(grads[1]), torch.tensor(0.01))
    assert get_total_norm([torch.ones(4)]) == 2.0


def check_units_in_another_order_are_named_on_every_rank(rank: int, world: int) -> None:
    """Blocks of one shape change places on one rank: an error before any gradient is there."""
    model, (ids,) = sharded(), batches(world, 1)
    loss_of(model, share(ids, rank)).backward()
    model.zero_grad()
    in_order = [model.blocks[index] for index in ((1, 0, 2) if rank else (0, 1, 2))]

    def forward(part: Tensor) -> Tensor:
        x = model.embed(part) * model.scale
        for block in in_order:
            x = block(x)
        return model.head(x)

    model.forward = forward
    with pytest.raises(flat_param.CommError) as caught:
        loss_of(model, share(ids, rank)).backward()
    assert str(caught.value).startswith(
        "flat_param.fully_shard: rank 0 did all_gather of unit 'blocks.1' where rank 1 did "
        "all_gather of unit 'blocks.0', but all ranks must run the same units in the same order."
    )
    assert all(param.grad is None for param in model.parameters())
    del model.forward
    loss_of(model, share(ids, rank)).backward()
    assert model.head.weight.grad is not None


if __name__ == "__main__":
    run_checks(globals())
