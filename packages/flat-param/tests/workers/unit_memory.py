"""How much of a unit is whole, when, and in which objects; one check per claim."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from _harness import (
    WAYS,
    Block,
    batches,
    loss_of,
    options_of,
    plain,
    planned_as,
    run_checks,
    sharded,
    share,
    whole_state,
)
from _whole import whole_bytes, whole_grad_bytes
from torch import nn

import flat_param


def note(seen: list[int], count: Callable[[nn.Module], int], model: nn.Module, *_: Any) -> None:
    """A hook that notes how much is whole."""
    seen.append(count(model))


def check_memory_of_whole_parameters_is_given_back(rank: int, world: int) -> None:
    """Memory of whole parameters is given back."""
    (ids,) = batches(world, 1)
    for way in WAYS:
        model = sharded(**options_of(way))
        assert whole_bytes(model) == 0
        with torch.no_grad():
            model(share(ids, rank))
        assert whole_bytes(model) == 0, way
        loss_of(model, share(ids, rank)).backward()
        assert whole_bytes(model) == 0, way


def check_peak_of_whole_parameters_is_as_planned(rank: int, world: int) -> None:
    """Peak of whole parameters is as planned."""
    units = flat_param.plan.unit_shapes(plain(), units=Block)
    for way in WAYS:
        model, seen = sharded(**options_of(way)), [0]
        told = partial(note, seen, whole_bytes, model)
        for module in model.blocks.modules():
            module.register_forward_hook(told)
            module.register_full_backward_hook(told)
        for ids in batches(world, 2):
            loss_of(model, share(ids, rank)).backward()
        plan = flat_param.plan.plan_training(units, **planned_as(way, world))
        assert max(seen) == plan.rank_bytes.whole_params_peak, (way, max(seen), str(plan))


def check_peak_of_whole_gradients_is_as_planned(rank: int, world: int) -> None:
    """The outermost unit ends with a head and begins with an embedding: its sum is the last."""
    units = flat_param.plan.unit_shapes(plain(), units=Block)
    for way in WAYS:
        model, seen = sharded(**options_of(way)), [0]
        for module in model.blocks.modules():
            module.register_full_backward_hook(partial(note, seen, whole_grad_bytes, model))
        for ids in batches(world, 2):
            loss_of(model, share(ids, rank)).backward()
        plan = flat_param.plan.plan_training(units, **planned_as(way, world))
        assert max(seen) == plan.rank_bytes.whole_grads_peak, (way, max(seen), str(plan))


def check_module_is_freed_at_once(rank: int, world: int) -> None:
    """A deleted module is freed with its units, without a garbage collection."""
    gc.collect()
    gc.disable()
    try:
        for way in WAYS:
            model = sharded(**options_of(way))
            with model.no_sync():
                loss_of(model, share(batches(world)[0], rank)).backward()
            loss_of(model, share(batches(world)[1], rank)).backward()
            whole_state(model)
            known = [weakref.ref(model), *map(weakref.ref, model.parameters())]
            del model
            assert [each() for each in known] == [None] * len(known), way
    finally:
        gc.enable()


if __name__ == "__main__":
    run_checks(globals())
