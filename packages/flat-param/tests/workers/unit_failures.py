"""A unit after an error goes on as if nothing had been; one check per claim."""

from __future__ import annotations

import time

import pytest
import torch
from _harness import batches, distance, loss_of, plain, raises, run_checks, sharded, share
from _whole import plain_grads, whole_grads
from torch import nn

import flat_param


def check_mistake_of_all_ranks_can_be_mended(rank: int, world: int) -> None:
    """Every rank refuses the same shape, mends it, casts alike, and trains on while one is slow."""
    model = sharded()
    (ids,) = batches(world, 1)
    kept = model.head.bias
    for value in (1, 2):
        model.head.bias = nn.Parameter(torch.zeros(value))
        with pytest.raises(flat_param.ParameterError, match="re-assigned with shape"):
            model(share(ids, rank))
        model.head.bias = kept
        model.to(torch.float64 if value == 1 else torch.float32)
        if rank == 0:
            time.sleep(0.8)  # longer than a rank waits before it looks for notices
        loss_of(model, share(ids, rank)).backward()
    assert model.head.bias.grad.dtype == torch.float32


def check_failed_forward_leaves_the_module_usable(rank: int, world: int) -> None:
    """Failed forward leaves the module usable."""
    model, reference = sharded(), plain()
    (ids,) = batches(world, 1)
    hook = model.blocks[1].register_forward_hook(lambda *_: 1 / 0)
    raises(ZeroDivisionError, "division", lambda: model(share(ids, rank)))
    hook.remove()
    loss_of(model, share(ids, rank)).backward()
    loss_of(reference, ids).backward()
    assert distance(whole_grads(model), plain_grads(reference)) < 1e-6


if __name__ == "__main__":
    run_checks(globals())
