"""Units that are gathered and freed by hand: values, gradients and gathers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from _harness import (
    batches,
    distance,
    loss_of,
    options_of,
    plain,
    raises,
    sharded,
    share,
    stepping,
    whole_state,
)
from _whole import same_grads, same_step, whole_bytes, whole_grads
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.nn import functional

import flat_param
from flat_param import fully_shard

FOLDER = Path()


def check_freed_units_are_gathered_again(rank: int, world: int) -> None:
    """Between steps, and between forward and backward; freeing what is free does nothing."""
    (ids,) = batches(world, 1)
    reference = plain()
    for way in ("ZeRO-3", "ZeRO-2"):
        model = sharded(**options_of(way))
        expected = same_step(model, reference, ids, rank)
        model.unshard(async_op=True)
        model.reshard()
        model.reshard()
        assert whole_bytes(model) == 0
        assert same_step(model, reference, ids, rank) == expected + 1
        model.zero_grad()
        loss = loss_of(model, share(ids, rank))
        for unit in (model, *model.blocks):
            unit.reshard()
        assert whole_bytes(model) == 0
        loss.backward()
        gathers = model.comm_counts()["all_gather"].calls
        assert gathers == 2 * len([model, *model.blocks])
        same_grads(model, reference)


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


def check_changes_of_shown_parameters_are_lost(rank: int, world: int) -> None:
    """As with FSDP2, where ranks have pieces; the next forward has the optimizer's values."""
    (ids,) = batches(world, 1)
    afters: tuple[Callable[[nn.Module], object], ...] = (
        lambda model: model.reshard(),
        lambda model: model(share(ids, rank)),
        lambda model: loss_of(model, share(ids, rank)).backward(),
        lambda model: model.state_dict(),
        lambda model: model.to(torch.float32),
    )
    ways = ({}, options_of("replicated"), {"offload_policy": CPUOffloadPolicy()})
    for at, after in enumerate(afters):
        for options in (ways[0], ways[1 + at % 2]):
            model = sharded(**options)
            model.unshard()
            if world > 1 and options != options_of("replicated"):
                with torch.no_grad():
                    model.head.weight.add_(1)
            model.head.bias = nn.Parameter(torch.full_like(model.head.bias, 2).detach())
            model.embed.weight.data = torch.zeros_like(model.embed.weight)
            after(model)
            assert distance(whole_state(model), plain().state_dict()) == 0, options
            same_step(model, plain(), ids, rank)


def check_steps_in_between_are_not_lost(rank: int, world: int) -> None:
    """An optimizer's step on the pieces is seen, where a rank has no piece, too."""
    first, second = batches(world, 2)
    for boundary, async_op in (("element", True), ("tensor", False)):
        without_versions = stepping(lambda param, *_: param.data.sub_(param.grad))
        for make in (lambda params: torch.optim.SGD(params, lr=1.0), without_versions):
            model, reference = sharded(boundary=boundary), plain()
            optimizers = make(list(model.parameters())), make(list(reference.parameters()))
            loss_of(model, share(first, rank)).backward()
            loss_of(reference, first).backward()
            for unit in (model, *model.blocks):
                unit.unshard(async_op=async_op)
            for optimizer in optimizers:
                optimizer.step()
            same_step(model, reference, second, rank)
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
            same_grads(model, reference)
            assert whole_bytes(model) == 0
            same_step(model, reference, ids, rank)


def check_writes_that_a_backward_misses_are_an_error(rank: int, world: int) -> None:
    """As in one process: what backward needs was changed in place."""
    model = sharded(reshard_after_forward=False)
    loss = loss_of(model, share(batches(world, 1)[0], rank))
    model.blocks[1].unshard()
    with torch.no_grad():
        model.blocks[1].up.weight.mul_(2)
    raises(RuntimeError, "modified by an inplace operation", loss.backward)


def check_everything_else_sees_pieces(rank: int, world: int) -> None:
    """Clipping, clearing, states, loads, casts and whole parameters, while units are whole."""
    first, second = batches(world, 2)
    other = plain(1).state_dict()
    uses: dict[str, Callable[[nn.Module], object]] = {
        "zero_grad": lambda model: model.zero_grad(),
        "clip": lambda model: model.clip_grad_norm_(1e-3),
        "state_dict": lambda model: model.state_dict(),
        "load": lambda model: model.load_state_dict(other),
        "to": lambda model: model.to(torch.float64).to(torch.float32),
        "whole": lambda model: _double(model),
        "full": lambda model: flat_param.full_state_dict(model),
        "save": lambda model: flat_param.save_sharded(model, FOLDER / "saved"),
        "load_sharded": lambda model: flat_param.load_sharded(model, FOLDER / "saved"),
    }
    found = {}
    for name, use in uses.items():
        for opened in (False, True):
            model = sharded()
            loss_of(model, share(first, rank)).backward()
            for unit in (model, *model.blocks):
                if opened:
                    unit.unshard()
                    unit.get_submodule("head" if unit is model else "up").bias.data.add_(0)
            result = use(model)
            result = result if isinstance(result, Tensor) else torch.zeros(())
            loss_of(model, share(second, rank)).backward()
            found[name, opened] = [result, whole_grads(model), whole_state(model)]
            assert whole_bytes(model) == 0, name
            assert all(param.is_leaf for param in model.parameters())
        (norm, grads, state), (expected, *others) = found[name, True], found[name, False]
        assert torch.equal(norm, expected), name
        assert distance(grads, others[0]) == 0, name
        assert distance(state, others[1]) == 0, name


def _double(model: nn.Module) -> None:
    with model.whole_params(write_back=True):
        for param in model.parameters():
            param.data.mul_(2)


def check_units_around_take_up_what_is_there(rank: int, world: int) -> None:
    """A unit that is made around one that is shown whole has none of its parameters."""
    inner = fully_shard(nn.Linear(4, 4))
    inner.unshard()
    outer = fully_shard(nn.Sequential(inner, nn.Linear(4, 4)))
    assert sorted(len(unit.parts[0].params) for unit in outer._flat_param.schedule.units) == [
        2,
        2,
    ]
    outer(torch.ones(1, 4)).sum().backward()
    assert all(param.grad is not None or not param.numel() for param in outer.parameters())
