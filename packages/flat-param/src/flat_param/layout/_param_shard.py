"""What one rank holds of each parameter of a segment, as the optimizer sees it.

Rule 1: a parameter that may be cut at any element, or after so many of them, is a 1-D tensor in the
optimizer. Where shards end at rows or tensors, and where one rank holds everything, it keeps its
number of dimensions; where they end inside of a matrix of several, the dimensions before its rows
become one.
Rule 2: every rank has a piece of every parameter; a piece may be empty.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from ._boundary import Cut
from ._shard import ShardPlan
from ._spec import ParamSpec, contiguous_stride


@dataclass(frozen=True)
class ParamShard:
    """Elements `[start, stop)` of one parameter, at `offset` in the shard.

    Attributes:
        spec: the whole parameter.
        offset: first element in the shard.
        start: first element of the parameter, in memory order.
        stop: one past the last element.
        shape: of the piece in the optimizer (Rule 1).
        stride: of the piece in the shard.
    """

    spec: ParamSpec
    offset: int
    start: int
    stop: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements held here; may be 0."""
        return self.stop - self.start

    def view(self, shard: Tensor) -> Tensor:
        """The piece as a view of a shard, outside autograd."""
        offset = shard.storage_offset() + self.offset
        return shard.detach().as_strided(self.shape, self.stride, offset)

    def flat(self, shard: Tensor) -> Tensor:
        """The piece's elements as a 1-D view of a shard."""
        return shard.detach()[self.offset : self.offset + self.numel]


def make_param_shards(plan: ShardPlan, rank: int) -> tuple[ParamShard, ...]:
    """One rank's piece of every parameter, in layout order (Rule 2)."""
    parts = {part.index: part for part in plan.parts(rank)}
    pieces = []
    for index, (spec, cut) in enumerate(zip(plan.layout.specs, plan.cuts, strict=True)):
        part = parts.get(index)
        offset, start, stop = (part.offset, part.start, part.stop) if part else (0, 0, 0)
        shape, stride = _shape_of(spec, stop - start, plan, cut)
        pieces.append(ParamShard(spec, offset, start, stop, shape, stride))
    return tuple(pieces)


def keeps_dims(plan: ShardPlan) -> bool:
    """Whether pieces are whole rows, blocks or tensors, or nothing (Rule 1)."""
    return plan.boundary != "element" or _is_one_rank(plan)


def stays_whole(plan: ShardPlan, index: int) -> bool:
    """Whether some rank has all of a parameter, in its own shape, however many ranks there are."""
    return _is_one_rank(plan) or plan.cuts[index].whole


def _is_one_rank(plan: ShardPlan) -> bool:
    return plan.world_size == 1


def _shape_of(
    spec: ParamSpec, numel: int, plan: ShardPlan, cut: Cut
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if _is_one_rank(plan) or (cut.whole and numel):
        return spec.shape, spec.stride
    if cut.inner is None or not spec.shape:
        return (numel,), (1,)
    row_numel = math.prod(cut.inner)
    shape = (numel // max(1, row_numel), *cut.inner)
    kept = len(shape) == len(spec.shape)
    return shape, spec.stride if kept else contiguous_stride(shape)
