"""Units that are gathered and freed by hand: values, gradients and gathers."""

from __future__ import annotations

from collections.abc import Callable

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
from _whole import plain_grads, whole_bytes, whole_grads
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.nn import functional

import flat_param
from flat_param import fully_shard
from flat_param.plan import CommCount


def _same_grads(model: nn.Module, ids: Tensor, rank: int, reference: nn.Module) -> int:
    """Compare a step's gradients with one process's; how many gathers it took."""
    reference.zero_grad()
    loss_of(reference, ids).backward()
    model.zero_grad()
    loss_of(model, share(ids, rank)).backward()
    gathers = model.comm_counts().get("all_gather", CommCount()).calls
    assert distance(whole_grads(model), plain_grads(reference)) < 1e-6
    assert whole_bytes(model) == 0
    model.comm_counts()
    return gathers


def _numel(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


def check_units_are_gathered_once(rank: int, world: int) -> None:
    """Shown at once or after the wait; the next step gathers only the other units."""
    (ids,) = batches(world, 1)
    reference = plain()
    for way in ("ZeRO-3", "ZeRO-2"):
        expected = _same_grads(sharded(**options_of(way)), ids, rank, reference)
        model = sharded(**options_of(way))
        assert model.blocks[1].unshard() is None
        assert model.blocks[1].unshard() is None
        handle = model.unshard(async_op=True)
        never = model.blocks[0].unshard(async_op=True)
        assert _numel(model.head) < _numel(reference.head)
        handle.wait()
        handle.wait()
        for name in ("head.weight", "embed.weight", "blocks.1.up.weight", "blocks.1.gain"):
            assert torch.equal(model.get_parameter(name), reference.get_parameter(name)), name
        assert _numel(model.blocks[0]) < _numel(reference.blocks[0])
        assert _same_grads(model, ids, rank, reference) == expected
        never.wait()
        assert whole_bytes(model) == 0
        assert _same_grads(model, ids, rank, reference) == expected


def check_freed_units_are_gathered_again(rank: int, world: int) -> None:
    """Between steps, and between forward and backward; freeing what is free does nothing."""
    (ids,) = batches(world, 1)
    reference = plain()
    for way in ("ZeRO-3", "ZeRO-2"):
        model = sharded(**options_of(way))
        expected = _same_grads(model, ids, rank, reference)
        model.unshard(async_op=True)
        model.reshard()
        model.reshard()
        assert whole_bytes(model) == 0
        assert _same_grads(model, ids, rank, reference) == expected + 1
        model.zero_grad()
        loss = loss_of(model, share(ids, rank))
        for unit in (model, *model.blocks):
            unit.reshard()
        assert whole_bytes(model) == 0
        loss.backward()
        gathers = model.comm_counts()["all_gather"].calls
        assert gathers == 2 * len([model, *model.blocks])
        assert distance(whole_grads(model), plain_grads(reference)) < 1e-6


def check_freed_units_are_gathered_in_their_turn(rank: int, world: int) -> None:
    """Backward prefetches them, as it does units resharded after forward."""
    model = sharded(reshard_after_forward=False)
    units = [block._flat_param for block in model.blocks]
    seen: list[list[bool]] = []
    for block in model.blocks:
        block.down.register_full_backward_hook(
            lambda *_: seen.append([unit.is_gathered for unit in units])
        )
    loss = loss_of(model, share(batches(world, 1)[0], rank))
    for block in model.blocks:
        block.reshard()
    loss.backward()
    assert seen == [[False, True, True], [True, True, False], [True, False, False]]


def check_steps_where_a_rank_has_no_piece_are_seen(rank: int, world: int) -> None:
    """Every rank gathers again after a step, also one that has no part of the unit's parameter."""
    for by_hand in (False, True):
        torch.manual_seed(0)
        model = fully_shard(
            nn.Linear(4, 4, bias=False), reshard_after_forward=False, boundary="tensor"
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        x = torch.ones(2, 4)
        model(x).sum().backward()
        if by_hand:
            model.unshard()
        else:
            model(x)
        optimizer.step()
        optimizer.zero_grad()
        whole = whole_state(model)["weight"] if not by_hand else None
        found = model(x)
        whole = whole_state(model)["weight"] if whole is None else whole
        assert torch.equal(found, nn.functional.linear(x, whole))


def check_changes_of_shown_parameters_are_lost(rank: int, world: int) -> None:
    """As with FSDP2, where ranks have pieces; the next forward has the optimizer's values."""
    (ids,) = batches(world, 1)
    afters: tuple[Callable[[nn.Module], object], ...] = (
        lambda model: model.reshard(),
        lambda model: model(share(ids, rank)),
        lambda model: loss_of(model, share(ids, rank)).backward(),
        whole_state,
        lambda model: model.to(torch.float32),
    )
    for options in ({}, options_of("replicated"), {"offload_policy": CPUOffloadPolicy()}):
        for after in afters:
            model = sharded(**options)
            model.unshard()
            if world > 1 and options != options_of("replicated"):
                with torch.no_grad():
                    model.head.weight.add_(1)
            model.head.bias = nn.Parameter(torch.full_like(model.head.bias, 2).detach())
            model.embed.weight.data = torch.zeros_like(model.embed.weight)
            after(model)
            assert distance(whole_state(model), plain().state_dict()) == 0, options
            _same_grads(model, ids, rank, plain())


class _OfData(torch.optim.Optimizer):
    """Steps without a trace in versions."""

    def __init__(self, params: object) -> None:
        super().__init__(params, {})

    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.data.sub_(param.grad)


def check_steps_in_between_are_not_lost(rank: int, world: int) -> None:
    """An optimizer's step on the pieces is seen, where a rank has no piece, too."""
    first, second = batches(world, 2)
    for options in ({}, {"boundary": "tensor"}):
        for make in (lambda params: torch.optim.SGD(params, lr=1.0), _OfData):
            for async_op in (False, True):
                model, reference = sharded(**options), plain()
                optimizers = make(list(model.parameters())), make(list(reference.parameters()))
                loss_of(model, share(first, rank)).backward()
                loss_of(reference, first).backward()
                for unit in (model, *model.blocks):
                    unit.unshard(async_op=async_op)
                for optimizer in optimizers:
                    optimizer.step()
                _same_grads(model, second, rank, reference)
                assert distance(whole_state(model), whole_state(reference)) < 1e-6


def check_use_beside_forward_has_its_gradients(rank: int, world: int) -> None:
    """Freed or not before backward, around a forward, in place of one; memory is given back."""
    (ids,) = batches(world, 1)
    x = torch.linspace(-1, 1, 2 * world * 7).view(2 * world, 7)

    def beside(module: nn.Module, value: Tensor) -> Tensor:
        value = value.to(module.head.weight.dtype)
        return functional.linear(value, module.head.weight, module.head.bias).square().mean()

    for way in ("ZeRO-3", "ZeRO-2"):
        for order in ("freed", "kept", "around", "alone"):
            model, reference = sharded(**options_of(way)), plain()
            expected = beside(reference, x)
            model.unshard()
            loss = beside(model, share(x, rank))
            if order == "freed":
                model.reshard()
                assert whole_bytes(model) == 0
            if order != "alone":
                expected = expected + loss_of(reference, ids)
                loss = loss + loss_of(model, share(ids, rank))
            if order == "around":
                model.unshard()
                loss = loss + beside(model, share(x, rank))
                expected = expected + beside(reference, x)
            loss.backward()
            expected.backward()
            del loss
            assert distance(whole_grads(model), plain_grads(reference)) < 1e-6, order
            assert whole_bytes(model) == 0
            _same_grads(model, ids, rank, reference)


def check_writes_that_a_backward_misses_are_an_error(rank: int, world: int) -> None:
    """As in one process: what backward needs was changed in place."""
    model = sharded(reshard_after_forward=False)
    loss = loss_of(model, share(batches(world, 1)[0], rank))
    model.blocks[1].unshard()
    with torch.no_grad():
        model.blocks[1].up.weight.mul_(2)
    raises(RuntimeError, "modified by an inplace operation", loss.backward)


class _Steers(nn.Module):
    """Gathers the last of its layers early, uses it beside its forward, and frees it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.frees: nn.Module | None = None
        self.in_backward: Callable[[Tensor], None] | None = None

    def forward(self, x: Tensor) -> Tensor:
        is_sharded = isinstance(self.second, flat_param.ShardedModule)
        if is_sharded:
            self.unshard()
            handle = self.second.unshard(async_op=True)
        x = torch.tanh(self.first(x))
        if is_sharded:
            handle.wait()
        y = x @ self.second.weight
        if self.in_backward is not None:
            y.register_hook(self.in_backward)
        if is_sharded:
            self.second.reshard()
        if self.frees is not None:
            self.frees.reshard()
        return self.second(y)


def check_forwards_may_gather_and_free_others(rank: int, world: int) -> None:
    """Inside a forward and a backward; what computes may be asked for and is not freed."""
    torch.manual_seed(0)
    reference = _Steers()
    model = _Steers()
    model.load_state_dict(whole_state(reference))
    fully_shard(model.first)
    fully_shard(model.second)
    fully_shard(model)
    x = torch.linspace(-1, 1, 8 * world).view(2 * world, 4)
    asked = []

    def ask(_: Tensor) -> None:
        model.first.unshard()
        asked.append(model.first.weight.shape)
        text = "unit 'first' is in the backward that runs, but"
        raises(flat_param.StateError, text, model.first.reshard)

    object.__setattr__(model, "in_backward", ask)
    for _ in range(2):
        for module in (model, reference):
            module.zero_grad()
        model(share(x, rank)).square().mean().backward()
        reference(x).square().mean().backward()
        assert distance(whole_grads(model), plain_grads(reference)) < 1e-6
        assert whole_bytes(model) == 0
    assert asked == [(4, 4)] * 2
    object.__setattr__(model, "frees", model)
    text = "flat_param.reshard: the outermost unit is in the forward that runs, but that computes"
    raises(flat_param.StateError, text, lambda: model(share(x, rank)))
    assert whole_bytes(model) == 0


def check_another_order_is_an_error(rank: int, world: int) -> None:
    """Units of one size, gathered by hand in another order on each rank."""
    model = sharded()
    for index in (0, 1) if rank == 0 else (1, 0):
        model.blocks[index].unshard()
    text = "rank 0 did all_gather of unit 'blocks.0' where rank 1 did all_gather of unit 'blocks.1'"
    loss = loss_of(model, share(batches(world, 1)[0], rank))
    raises(flat_param.CommError, text, loss.backward)


if __name__ == "__main__":
    run_checks(globals())
