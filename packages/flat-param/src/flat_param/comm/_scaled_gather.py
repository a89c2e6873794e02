"""Gathers a segment in low precision, see Scaled.

Note [Message]
    Each rank gives its blocks and after them their scales, all as bytes, in one message. All are as
    long as that of the rank with most blocks; what is left over is never read.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..layout._scaled import Scaled
from ..layout._shard import ShardPlan
from ..memory._scaled_values import dequantize_, quantize
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
    low, scales = quantize(_blocks(shard, plan, rank), how)
    size = plan.most_blocks
    message = torch.zeros(how.message_bytes(size), dtype=torch.uint8, device=shard.device)
    low_bytes, scale_bytes = _divided(message, size, how)
    low_bytes[: low.nbytes].copy_(low.view(-1).view(torch.uint8))
    scale_bytes[: scales.nbytes].copy_(scales.view(torch.uint8))
    return message


def _blocks(shard: Tensor, plan: ShardPlan, rank: int) -> Tensor:
    """The rank's blocks, `(blocks, block)`; a view where its range consists of whole ones."""
    (start, stop), (first, end) = plan.ranges[rank], plan.blocks[rank]
    size = plan.layout.block_numel
    own = shard.detach()[: stop - start][first * size - start :]
    if own.numel() < (end - first) * size:
        own = torch.nn.functional.pad(own, (0, (end - first) * size - own.numel()))
    return own.view(-1, size)


def _divided(messages: Tensor, blocks: int, how: Scaled) -> tuple[Tensor, Tensor]:
    """The bytes of low-precision values and of scales, of messages `(..., bytes)`."""
    cut = blocks * how.block * how.dtype.itemsize
    return messages[..., :cut], messages[..., cut:]


def read_messages(full: Tensor, received: Tensor, plan: ShardPlan, how: Scaled) -> None:
    """Fill the whole buffer from the messages of all ranks.

    Args:
        full: `(plan.numel,)`, of the computing dtype.
        received: `(ranks, bytes)`.
        plan: of all ranks.
        how: dtypes and blocks.
    """
    size = plan.layout.block_numel
    most = plan.most_blocks
    low_bytes, scale_bytes = _divided(received, most, how)
    low = low_bytes.view(how.dtype).unflatten(1, (most, size))
    scales = scale_bytes.clone().view(how.scale_dtype)  # a clone is aligned
    blocks = full.detach().view(-1, size)
    if len(blocks) == plan.world_size * most:
        dequantize_(blocks.view(low.shape), low, scales)
        return
    for rank, (first, end) in enumerate(plan.blocks):
        count = end - first
        dequantize_(blocks[first:end], low[rank, :count], scales[rank, :count])
