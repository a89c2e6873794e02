"""Passes of a unit, forward and backward, in any number and order; one check per claim."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from functools import partial

import pytest
import torch
from _harness import WAYS, Block, batches, loss_of, options_of, plain, sharded, share
from _whole import note, same_grads, same_step, whole_bytes
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flat_param import StateError, fully_shard


def check_no_sync_accumulates_and_stays_silent(rank: int, world: int) -> None:
    """No sync accumulates and stays silent."""
    for way in WAYS:
        reference, model = plain(), sharded(**options_of(way))
        inputs = batches(world)
        for ids in inputs:
            loss_of(reference, ids).backward()
        with model.no_sync():
            loss_of(model, share(inputs[0], rank)).backward()
            model.comm_counts()
            loss_of(model, share(inputs[1], rank)).backward()
            counts = model.comm_counts()
        assert all(param.grad is None for param in model.parameters())
        expected = {"all_gather"} if way == "ZeRO-3" else set()
        assert set(counts) == expected, (way, counts)
        loss_of(model, share(inputs[2], rank)).backward()
        same_grads(model, reference)


def check_one_forward_two_backwards(rank: int, world: int) -> None:
    """One forward two backwards."""
    reference, model = plain(), sharded()
    (ids,) = batches(world, 1)
    for module, part in ((reference, ids), (model, share(ids, rank))):
        loss = loss_of(module, part)
        loss.backward(retain_graph=True)
        loss.backward()
    same_grads(model, reference)


def check_activation_checkpointing_inside_and_around_units(rank: int, world: int) -> None:
    """Without a backward inside the backward."""
    again = partial(checkpoint, use_reentrant=False)
    around, inside, both = sharded(), sharded(), sharded()
    around.forward = partial(_forward, around, again)
    both.forward = partial(_forward, both, again)
    for block in (*inside.blocks, *both.blocks):
        block.forward = partial(again, Block.forward, block)
    for model in (around, inside, both):
        for ids in batches(world):
            same_step(model, plain(), ids, rank)


def _forward(model: nn.Module, again: Callable[..., Tensor], part: Tensor) -> Tensor:
    x = model.embed(part) * model.scale
    for block in model.blocks:
        x = again(block, x)
    return model.head(x)


def check_a_backward_inside_one_through_the_same_units_is_refused(rank: int, world: int) -> None:
    """Where it has gradients for what is summed already; the next step is right all the same."""
    model, seen = sharded(), []
    first, second = batches(world, 2)
    model.blocks[0].register_forward_hook(lambda *call: seen.append(call[-1]))
    loss, other = (loss_of(model, share(ids, rank)) for ids in (first, second))
    seen[0].register_hook(lambda grad: other.backward())
    with pytest.raises(StateError, match="another gradient, of a backward inside"):
        loss.backward()
    same_step(model, plain(), second, rank)


def check_units_nest_three_deep(rank: int, world: int) -> None:
    """A layer in a block in the model, each a unit with direct parameters."""
    model = plain()
    for block in model.blocks:
        fully_shard(block.up)
        fully_shard(block)
    fully_shard(model)
    assert len(model._flat_param.schedule.units) == 7
    same_step(model, plain(), batches(world, 1)[0], rank)


def check_input_used_in_many_steps_is_hooked_once(rank: int, world: int) -> None:
    """A leaf that is the input of 12 steps, with and without backward, has one hook a unit."""
    model = fully_shard(nn.Sequential(fully_shard(nn.Linear(3, 3)), nn.Linear(3, 2)))
    x = torch.ones(2, 3, requires_grad=True)
    for step in range(12):
        out = model(x).sum()
        if step % 2:
            out.backward()
        assert len(x._backward_hooks) == 2
    del model, out
    gc.collect()
    assert all(hook.args[0].unit() is None for hook in x._backward_hooks.values())


def check_dropped_forwards_keep_nothing_whole(rank: int, world: int) -> None:
    """Of an evaluation without no_grad; a rank that keeps their losses frees units at the end."""
    first, *others = batches(world, 4)
    for keeps in (False, True):
        model, kept, peaks = sharded(), [], []
        for count in (0, 3, 0):
            losses = [loss_of(model, share(ids, rank)) for ids in others[:count]]
            kept += losses if keeps and rank else []
            del losses
            seen = [0]
            told = partial(note, seen, whole_bytes, model)
            handles = [block.up.register_full_backward_hook(told) for block in model.blocks]
            same_step(model, plain(), first, rank)
            peaks.append(max(seen))
            for handle in handles:
                handle.remove()
        assert peaks[0] == peaks[2]
        assert (peaks[1] == peaks[0]) != bool(kept)


def check_a_loss_of_an_input_alone_sends_nothing(rank: int, world: int) -> None:
    """On one rank, before and after the backward of the units; gradients are the plain ones."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    reference = copy.deepcopy(model)
    fully_shard(model[0])
    fully_shard(model)
    for module in (model, reference):
        x = torch.full((2, 4), 0.5, requires_grad=True)
        loss = module(x).square().sum()
        for after in (False, True):
            if module is model:
                model.comm_counts()
            if rank == 0:
                (x * 2).sum().backward()
            if module is model:
                assert model.comm_counts() == {}
            if not after:
                loss.backward()
    same_grads(model, reference)


class Branches(nn.Module):
    """A frozen layer after an inner unit, and a scaled input that is used last."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.frozen = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
        self.scale = nn.Parameter(torch.full((4,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        """`(batch, 4)` to the same."""
        return self.frozen(self.inner(x.detach())) + x * self.scale


def check_frozen_weights_stay_for_units_inside(rank: int, world: int) -> None:
    """The gradients of the unit and of its input come before a frozen weight is read."""
    for around in (nn.Identity(), nn.Linear(4, 4)):
        torch.manual_seed(0)
        reference = nn.Sequential(around, Branches())
        model = copy.deepcopy(reference)
        for module in (model[1].inner, model[1], model):  # type: ignore[union-attr]
            fully_shard(module)
        for module in (reference, model):
            x = torch.full((2, 4), 0.5, requires_grad=True)
            module(x).square().sum().backward()
        same_grads(model, reference)
