"""Units, and copies of them, on four ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from _harness import (
    Model,
    batches,
    distance,
    loss_of,
    plain,
    raises,
    run_checks,
    sharded,
    share,
)
from _whole import plain_grads, whole_bytes, whole_grads
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import flat_param


class PastUnits(Model):
    """Calls a layer inside of its first block itself."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) + self.blocks[0].up(self.embed(ids))[..., :11]


def _past(*, unit: bool) -> PastUnits:
    torch.manual_seed(0)
    model = PastUnits()
    if unit:
        flat_param.fully_shard(model.blocks[0].up)
    for block in model.blocks:
        flat_param.fully_shard(block)
    return flat_param.fully_shard(model)


def check_module_called_past_its_unit_is_named(rank: int, world: int) -> None:
    """With a way out that works; the model may be used on."""
    (ids,) = batches(world, 1)
    torch.manual_seed(0)
    reference = PastUnits()
    loss_of(reference, ids).backward()
    model = _past(unit=False)
    text = "linear computes with it, but only a call of unit 'blocks.0' makes it whole, (15, 7)."
    raises(flat_param.StateError, text, lambda: loss_of(model, share(ids, rank)))
    assert whole_bytes(model) == 0
    model = _past(unit=True)
    loss_of(model, share(ids, rank)).backward()
    assert distance(whole_grads(model), plain_grads(reference)) < 1e-6


def check_errors_of_whole_modules_are_their_own(rank: int, world: int) -> None:
    """A wrong input of a unit that computes stays torch's error."""
    model = sharded()
    model.blocks[0].up.register_forward_pre_hook(lambda *_: torch.ones(2, 3))
    (ids,) = batches(world, 1)
    raises(RuntimeError, "shapes cannot be multiplied", lambda: loss_of(model, share(ids, rank)))


def _copies() -> Model:
    """Two copies, each divided over two ranks."""
    return sharded(mesh=init_device_mesh("cpu", (2, 2)))


def check_copies_in_another_order_are_named(rank: int, world: int) -> None:
    """Ranks that divide the parameters agree, but the copies do not: no gradient is there."""
    model, (ids,) = _copies(), batches(world, 1)
    in_order = [model.blocks[index] for index in ((0, 1, 2) if rank < 2 else (1, 0, 2))]

    def forward(part: Tensor) -> Tensor:
        x = model.embed(part) * model.scale
        for block in in_order:
            x = block(x)
        return model.head(x)

    model.forward = forward
    with pytest.raises(flat_param.CommError) as caught:
        loss_of(model, share(ids, rank)).backward()
    first, other = (rank % 2), (rank % 2) + 2
    assert str(caught.value).startswith(f"flat_param.fully_shard: rank {first} did "), caught.value
    assert f" where rank {other} did " in str(caught.value)
    assert all(param.grad is None for param in model.parameters())


def check_layer_unused_by_one_copy_gets_the_mean_with_zero(rank: int, world: int) -> None:
    """Both copies have its gradient."""
    reference, model, (ids,) = plain(), _copies(), batches(world, 1)

    def loss(module: Any, part: Tensor, *, skip: bool) -> Tensor:
        x = module.embed(part)
        for index, block in enumerate(module.blocks):
            out = block(x)
            x = x if skip and index == 1 else out
        return module.head(x).square().mean()

    model.forward = partial(loss, model, skip=rank >= 2)
    for other in range(world):
        (loss(reference, share(ids, other), skip=other >= 2) / world).backward()
    model(share(ids, rank)).backward()
    assert distance(whole_grads(model), plain_grads(reference)) < 1e-6


def check_sums_are_those_in_the_order_of_ranks(rank: int, world: int) -> None:
    """Bit by bit: gradients are the mean of what one process has for each rank's share."""
    torch.manual_seed(0)
    reference, inputs = nn.Linear(5, 7), torch.randn(world, 2, 5)
    total: list[Tensor] = []
    for each in inputs:
        reference.zero_grad()
        reference(each).square().sum().backward()
        grads = [param.grad.clone() for param in reference.parameters()]
        total = [a + b for a, b in zip(total, grads, strict=True)] if total else grads
    for boundary in ("element", "row"):
        model = nn.Linear(5, 7)
        model.load_state_dict(reference.state_dict())
        flat_param.fully_shard(model, boundary=boundary)
        model(inputs[rank]).square().sum().backward()
        for found, expected in zip(whole_grads(model).values(), total, strict=True):
            assert torch.equal(found, expected / world), boundary


if __name__ == "__main__":
    run_checks(globals())
