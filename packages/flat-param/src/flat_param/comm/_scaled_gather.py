"""Gathers a segment in low precision, see Scaled.

Note [Message]
    Each rank gives its blocks and after them their scales, all as bytes, in one message. All are as
    long as that of the rank with most blocks; what is left over is never read. Of tiles, values lie
    as they do in the shard, and scales piece by piece.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..layout._scaled import Scaled
from ..layout._shard import ShardPlan
from ..layout._tiles import grid_of, matrices_in
from ..memory._scaled_values import dequantize_, dequantize_tiles_, quantize, quantize_tiles
from ._comm import Communicator, Pending


@torch.no_grad()
def gather_scaled(
    comm: Communicator,
    shard: Tensor,
    plan: ShardPlan,
    how: Scaled,
    *,
    device: torch.device,
    need_full: Callable[[], Tensor],
) -> Pending:
    """Begin to fill a segment's whole buffer with what is sent of every rank's shard. Collective.

    Args:
        comm: of the ranks.
        shard: this rank's, at least as long as its range.
        plan: of all ranks.
        how: dtypes and blocks.
        device: where messages are exchanged.
        need_full: gives the buffer, `(plan.numel,)`; asked when the messages are there.
    """
    message = make_message(shard, plan, comm.rank, how).to(device)
    received = message.new_empty(plan.world_size, message.numel())
    pending = comm.all_gather(received.view(-1), message)

    @torch.no_grad()
    def finish() -> None:
        read_messages(need_full(), received, plan, how)

    return pending.then(finish)


def make_message(shard: Tensor, plan: ShardPlan, rank: int, how: Scaled) -> Tensor:
    """What one rank sends, see Note [Message].

    Args:
        shard: at least as long as the rank's range.
        plan: of all ranks.
        rank: which one.
        how: dtypes and blocks.

    Returns:
        Bytes, on the shard's device.
    """
    message = torch.zeros(how.sent_bytes(*plan.most_sent), dtype=torch.uint8, device=shard.device)
    low_bytes, scale_bytes = _divided(message, plan, how)
    rounded = _in_blocks if how.tile is None else _in_tiles
    low, scales = rounded(shard.detach(), plan, rank, how)
    low_bytes[: low.nbytes].copy_(low.view(-1).view(torch.uint8))
    scale_bytes[: scales.nbytes].copy_(scales.view(torch.uint8))
    return message


def _in_blocks(shard: Tensor, plan: ShardPlan, rank: int, how: Scaled) -> tuple[Tensor, Tensor]:
    return quantize(_blocks(shard, plan, rank), how)


def _in_tiles(shard: Tensor, plan: ShardPlan, rank: int, how: Scaled) -> tuple[Tensor, Tensor]:
    values, most = plan.most_sent
    low = shard.new_zeros(values, dtype=how.dtype)
    scales = shard.new_empty(most, dtype=how.scale_dtype)
    for place in _tile_places(plan, rank):
        some, own = quantize_tiles(shard[place.values].view(place.matrices), how)
        low[place.values].copy_(some.view(-1))
        scales[place.scales].copy_(own.view(-1))
    return low, scales


@dataclass(frozen=True)
class _TilePlace:
    """Where a rank's piece of one parameter is.

    Args:
        values: in the rank's range.
        scales: among the rank's.
        matrices: how many, their rows and columns.
        grid: the same of scales.
    """

    values: slice
    scales: slice
    matrices: tuple[int, int, int]
    grid: tuple[int, int, int]


def _tile_places(plan: ShardPlan, rank: int) -> Iterator[_TilePlace]:
    tile, end = plan.layout.tile, 0
    assert tile is not None
    for part in plan.parts(rank):
        count, rows, columns = matrices_in(plan.layout.specs[part.index].shape, tile, part.numel)
        grid = count, *grid_of(rows, columns, tile)
        first, end = end, end + math.prod(grid)
        values = slice(part.offset, part.offset + part.numel)
        yield _TilePlace(values, slice(first, end), (count, rows, columns), grid)


def _blocks(shard: Tensor, plan: ShardPlan, rank: int) -> Tensor:
    """The rank's blocks, `(blocks, block)`; a view where its range consists of whole ones."""
    (start, stop), (first, end) = plan.ranges[rank], plan.blocks[rank]
    size = plan.layout.block_numel
    own = shard[: stop - start][first * size - start :]
    if own.numel() < (end - first) * size:
        own = torch.nn.functional.pad(own, (0, (end - first) * size - own.numel()))
    return own.view(-1, size)


def _divided(messages: Tensor, plan: ShardPlan, how: Scaled) -> tuple[Tensor, Tensor]:
    """The bytes of low-precision values and of scales, of messages `(..., bytes)`."""
    cut = how.sent_bytes(plan.most_sent[0], 0)
    return messages[..., :cut], messages[..., cut:]


def read_messages(full: Tensor, received: Tensor, plan: ShardPlan, how: Scaled) -> None:
    """Fill the whole buffer from the messages of all ranks.

    Args:
        full: `(plan.numel,)`, of the computing dtype.
        received: `(ranks, bytes)`.
        plan: of all ranks.
        how: dtypes and blocks.
    """
    if not received.numel():  # parameters of no elements, and torch views no bytes as float32
        return
    low_bytes, scale_bytes = _divided(received, plan, how)
    low = low_bytes.view(how.dtype)
    scales = scale_bytes.clone().view(how.scale_dtype)  # a clone is aligned
    read = _read_blocks if how.tile is None else _read_tiles
    read(full.detach(), low, scales, plan, how)


def _read_blocks(full: Tensor, low: Tensor, scales: Tensor, plan: ShardPlan, _: Scaled) -> None:
    size = plan.layout.block_numel
    most = plan.most_blocks
    low = low.unflatten(1, (most, size))
    blocks = full.view(-1, size)
    if len(blocks) == plan.world_size * most:
        dequantize_(blocks.view(low.shape), low, scales)
        return
    for rank, (first, end) in enumerate(plan.blocks):
        count = end - first
        dequantize_(blocks[first:end], low[rank, :count], scales[rank, :count])


def _read_tiles(full: Tensor, low: Tensor, scales: Tensor, plan: ShardPlan, how: Scaled) -> None:
    for start, stop in plan.layout.gaps:
        full[start:stop].zero_()
    for rank, (start, stop) in enumerate(plan.ranges):
        own = full[start:stop]
        for place in _tile_places(plan, rank):
            dequantize_tiles_(
                own[place.values].view(place.matrices),
                low[rank, place.values].view(place.matrices),
                scales[rank, place.scales].view(place.grid),
                how,
            )
