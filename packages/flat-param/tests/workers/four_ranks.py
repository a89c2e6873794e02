"""Units that smaller groups keep from forward to backward, and copies, on four ranks."""

from __future__ import annotations

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
from _whole import same_grads, whole_bytes, whole_grads
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import flat_param

BOUNDARIES = ("element", "row", "tensor")


def _kept_bytes(model: Model) -> int:
    kept = [unit._kept for unit in model._flat_param.schedule.units]
    return sum(each.nbytes for each in kept if each is not None)


def _parts(model: Model) -> list[flat_param.plan.ShardPlan]:
    return [part.plan for block in model.blocks for part in block._flat_param.parts]


def _sent(model: Model, ids: Tensor, rank: int) -> int:
    model.zero_grad()
    model.comm_counts()
    loss_of(model, share(ids, rank)).backward()
    return model.comm_counts()["all_gather"].wire_bytes


def check_groups_send_and_keep_their_parts(rank: int, world: int) -> None:
    """Bytes gathered and kept are counted; gradients equal the plain model's."""
    (ids,) = batches(world, 1)
    reference = plain()
    loss_of(reference, ids).backward()
    for boundary in BOUNDARIES:
        model = sharded(boundary=boundary)
        usual = _sent(model, ids, rank)
        model.set_reshard_after_forward(2)
        parts = [(4 * plan.shard_numel, 4 * -(-plan.numel // 2)) for plan in _parts(model)]
        assert _sent(model, ids, rank) == usual - sum(3 * shard - half for shard, half in parts)
        same_grads(model, reference)
        assert (whole_bytes(model), _kept_bytes(model)) == (0, 0)
        loss = loss_of(model, share(ids, rank))
        assert _kept_bytes(model) == sum(half for _, half in parts)
        loss.backward()
        with torch.no_grad():
            loss_of(model, share(ids, rank))
        assert _kept_bytes(model) == 0
        model.set_reshard_after_forward(True)
        assert _sent(model, ids, rank) == usual
        other = sharded(boundary=boundary, reshard_after_forward=2)
        assert _sent(other, ids, rank) == usual - sum(3 * shard - half for shard, half in parts)


def check_groups_of_one_and_of_all_are_the_two_switches(rank: int, world: int) -> None:
    """One rank keeps everything; all ranks keep their shards."""
    (ids,) = batches(world, 1)
    model = sharded()
    for number, switch in ((1, False), (world, True)):
        model.set_reshard_after_forward(switch)
        expected = _sent(model, ids, rank)
        model.set_reshard_after_forward(number)
        assert _sent(model, ids, rank) == expected


def check_changed_parameters_are_gathered_from_shards(rank: int, world: int) -> None:
    """A step between forward and backward: backward sees it, as without groups."""
    first, second = batches(world, 2)
    found = []
    for how in (True, 2):
        model = sharded()
        model.set_reshard_after_forward(how)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        loss_of(model, share(first, rank)).backward()
        loss = loss_of(model, share(second, rank))
        optimizer.step()
        optimizer.zero_grad()
        loss.backward()
        found.append(whole_grads(model))
    assert distance(*found) == 0


def check_numbers_that_do_not_divide_are_refused(rank: int, world: int) -> None:
    """By name, and nothing is changed."""
    model = sharded()
    for number in (3, 0, -2, 8):
        raises(
            flat_param.StateError,
            f"{number} ranks are to keep the outermost unit, but it is divided over 4",
            lambda number=number: model.set_reshard_after_forward(number),
        )
    raises(
        flat_param.StateError,
        "3 ranks are to keep a unit, but it is divided over 4",
        lambda: flat_param.fully_shard(plain(), reshard_after_forward=3),
    )
    units = model._flat_param.schedule.units
    assert all(unit.frees_after_forward and unit.regroup is None for unit in units)


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
