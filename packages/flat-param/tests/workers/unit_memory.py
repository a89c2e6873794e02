"""How much of a unit is whole, when, and in which objects; one check per claim."""

from __future__ import annotations

from functools import partial
from itertools import product

from _harness import (
    WAYS,
    Block,
    batches,
    loss_of,
    options_of,
    plain,
    planned_as,
    sharded,
    share,
)
from _whole import note, whole_bytes, whole_grad_bytes

import flat_param


def check_peaks_are_as_planned(rank: int, world: int) -> None:
    """Of whole parameters, and of gradients that are not reduced.

    The outermost unit ends with a head and begins with an embedding: its sum is the last.
    """
    units = flat_param.plan.unit_shapes(plain(), units=Block)
    kinds = ((whole_bytes, "whole_params_peak"), (whole_grad_bytes, "whole_grads_peak"))
    for way, (count, kind) in product(WAYS, kinds):
        model, seen = sharded(**options_of(way)), [0]
        told = partial(note, seen, count, model)
        for module in model.blocks.modules():
            module.register_forward_hook(told)
            module.register_full_backward_hook(told)
        for ids in batches(world, 2):
            loss_of(model, share(ids, rank)).backward()
        plan = flat_param.plan.plan_training(units, **planned_as(way, world))
        assert max(seen) == getattr(plan, kind), (way, kind, max(seen), str(plan))


def check_frozen_segments_have_no_gradient_memory_or_traffic(rank: int, world: int) -> None:
    """Nothing is kept for frozen blocks, and nothing is summed over ranks."""
    model = plain()
    for name, param in model.named_parameters():
        param.requires_grad_(name.startswith("head"))
    for block in model.blocks:
        flat_param.fully_shard(block)
    flat_param.fully_shard(model)
    (ids,) = batches(world, 1)
    loss_of(model, share(ids, rank)).backward()
    counts = model.comm_counts()
    assert counts["reduce_scatter"].calls == 1
    assert all(not block._flat_param.trained for block in model.blocks)
    assert model.blocks[0].up.weight.grad is None
    assert model.head.weight.grad is not None
