"""What gloo moves with the fewest copies: exchanges, in the place of its gathers and sums.

Its all_gather receives into memory of its own and copies everything from there. Its reduce_scatter
and all_reduce move more bytes than handing every rank its part of everyone's tensor. Its all_to_all
receives in place, and copies only what a rank sends to itself.

Rule 1: of two ranks each has its own half and needs the other's: they exchange those, and gloo
        copies nothing.
Rule 2: a sum runs in the order of ranks, so that it is the same every time. Of two ranks either
        order gives the same.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ._buffer_pool import acquire, release

Arguments = tuple[Tensor, Tensor, list[int] | None, list[int] | None]
"""What `all_to_all_single` takes: where to, what, and elements from and to each rank."""


def to_gather_halves(full: Tensor, shard: Tensor, *, rank: int) -> Arguments:
    """Copy a rank's `shard` (shard,) to `full` (2 * shard,); exchange what gathers the other's."""
    mine, others = _halves(full, rank)
    mine.copy_(shard)
    return _between_two(others, shard, rank)


def to_sum(
    out: Tensor, full: Tensor, *, rank: int, world_size: int
) -> tuple[Arguments, Callable[[], None]]:
    """What to exchange so that `out` (shard,) becomes a sum over ranks, and what then adds it up.

    Args:
        out: this rank's part of the sum.
        full: what this rank adds, `(world * shard,)`.
        rank: this one.
        world_size: how many there are.
    """
    mine, given = _halves(full, rank) if world_size == 2 else (None, full)
    buffer = acquire(given.numel(), dtype=full.dtype, device=full.device)
    received = buffer[: given.numel()]

    def add_up() -> None:
        parts = received.split(out.numel()) if mine is None else (mine, received)
        first, second, *others = parts
        torch.add(first, second, out=out)  # a third of the time of a sum over few rows
        for other in others:
            out.add_(other)
        release(buffer)

    if mine is None:
        return (received, given, None, None), add_up
    return _between_two(received, given, rank), add_up


def _halves(full: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """What one of two ranks has of `full`, and what the other one has."""
    size = full.numel() // 2
    first, second = full[:size], full[size:]
    return (second, first) if rank else (first, second)


def _between_two(out: Tensor, given: Tensor, rank: int) -> Arguments:
    sizes = [given.numel(), 0] if rank else [0, given.numel()]
    return out, given, sizes, sizes
