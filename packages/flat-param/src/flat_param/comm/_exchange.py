"""gloo's gathers and sums as all_to_all, which copies and sends less.

gloo's all_gather receives into separate memory and copies from there, and its reduce_scatter sends
more bytes than needed. Its all_to_all receives in place and copies only what a rank sends to
itself: nothing if two ranks exchange halves. Sums are added in the order of ranks, so they are
deterministic.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ._buffer_pool import BufferPool

Arguments = tuple[Tensor, Tensor, list[int] | None, list[int] | None]
"""Arguments of `all_to_all_single`: output, input, elements from and to each rank."""


def to_gather_halves(full: Tensor, shard: Tensor, *, rank: int) -> Arguments:
    """Copy `shard` (shard,) into `full` (2 * shard,), and exchange the other half."""
    mine, others = _halves(full, rank)
    mine.copy_(shard)
    return _between_two(others, shard, rank)


def to_sum(
    out: Tensor, full: Tensor, *, rank: int, world_size: int, pool: BufferPool
) -> tuple[Arguments, Callable[[], None]]:
    """The exchange for a sum of `full` (world * shard,) into `out` (shard,), and the addition."""
    mine, given = _halves(full, rank) if world_size == 2 else (None, full)
    buffer = pool.acquire(given.numel(), dtype=full.dtype, device=full.device)
    received = buffer[: given.numel()]

    def add_up() -> None:
        parts = received.split(out.numel()) if mine is None else (mine, received)
        first, second, *others = parts
        torch.add(first, second, out=out)  # a third of the time of a sum over few rows
        for other in others:
            out.add_(other)
        pool.release(buffer)

    if mine is None:
        return (received, given, None, None), add_up
    return _between_two(received, given, rank), add_up


def _halves(full: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """This rank's half of `full`, and the other rank's."""
    size = full.numel() // 2
    first, second = full[:size], full[size:]
    return (second, first) if rank else (first, second)


def _between_two(out: Tensor, given: Tensor, rank: int) -> Arguments:
    sizes = [given.numel(), 0] if rank else [0, given.numel()]
    return out, given, sizes, sizes
