"""Optimizer state with a row for each block of a parameter, such as scales of 8-bit moments.

Rule 1: where a boundary keeps rows or blocks whole, a rank's state has a row for each that it
        holds, and the whole tensor has all of them in order. The last block may be short, and has
        a row like the others. Tiles have a row for each row of tiles.
Rule 2: a tensor is taken for such state if it has as many rows as there are blocks: in the rank's
        piece, or in the parameter; and if no other parameter has the same tensor, see
        `shared_rows`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..dcp._tensor_slice import TensorSlice
from ..layout._boundary import boundaries_of, numel_of_block
from ..layout._shard import ShardPlan
from ..layout._spec import ParamSpec
from ..sharded._sharded_params import HandsOut, ShardedParams


@dataclass(frozen=True)
class BlockRows:
    """Which blocks of a parameter a rank holds, where that is not all or nothing.

    Args:
        first: of them.
        count: of them.
        total: of the parameter.
    """

    first: int
    count: int
    total: int

    def fits_piece(self, key: str, state: Any) -> bool:
        """Whether state that the optimizer has is a row for each block here (Rule 2)."""
        return _has_rows(key, state, self.count)

    def fits_whole(self, key: str, state: Any) -> bool:
        """Whether state of the whole parameter has a row for each block (Rule 2)."""
        return _has_rows(key, state, self.total)

    def of(self, whole: Tensor) -> Tensor:
        """The rows here of a whole tensor; a view."""
        return whole[self.first : self.first + self.count]

    def slice_of(self, key: str, rows: Tensor) -> TensorSlice:
        """The rows here as a part of a checkpoint's tensor.

        Args:
            key: in the checkpoint.
            rows: `(count, ...)`; contiguous, where they are to be filled.
        """
        rest = tuple(rows.shape[1:])
        spec = ParamSpec(key, (self.total, *rest), rows.dtype)
        elements = rows.detach().contiguous().view(-1)
        return TensorSlice(key, spec, self.first * math.prod(rest), elements)


def _has_rows(key: str, state: Any, count: int) -> bool:
    if key == "step" or not isinstance(state, Tensor) or not state.numel():
        return False
    return state.dim() > 0 and state.shape[0] == count


def block_rows(plan: ShardPlan, index: int, start: int, stop: int) -> BlockRows | None:
    """The blocks in `[start, stop)` of a parameter; None where it has none, or none but these."""
    spec = plan.layout.specs[index]
    names = [each.name for each in plan.layout.specs]
    size = numel_of_block(spec.shape, spec.stride, boundaries_of(plan.boundary, names)[index])
    if not size or stop - start in (0, spec.numel):
        return None
    first = start // size
    return BlockRows(first, -(-stop // size) - first, -(-spec.numel // size))


def gather_rows(
    part: ShardedParams,
    index: int,
    mine: Tensor | None,
    *,
    dtype: torch.dtype,
    rest: tuple[int, ...],
    hands_out: HandsOut,
) -> Tensor:
    """All rows of one state of a parameter that is cut. Collective.

    Args:
        part: the segment.
        index: of the parameter.
        mine: this rank's rows; None where it holds none.
        dtype: of them.
        rest: sizes behind the first dimension.
        hands_out: what is kept.
    """
    comm = part.comms.gather
    counts = [_count(part.plan, index, rank) for rank in range(comm.world_size)]
    sent = torch.zeros(max(counts), *rest, dtype=dtype, device=part.device)
    if mine is not None:
        sent[: len(mine)].copy_(mine)
    received = sent.new_empty(len(counts), *sent.shape)
    comm.all_gather(received.view(-1).view(torch.uint8), sent.view(-1).view(torch.uint8)).wait()
    rows = [each[:count] for each, count in zip(received, counts, strict=True)]
    return hands_out(torch.cat(rows))


def _count(plan: ShardPlan, index: int, rank: int) -> int:
    for part in plan.parts(rank):
        if part.index == index:
            rows = block_rows(plan, index, part.start, part.stop)
            return 0 if rows is None else rows.count
    return 0
