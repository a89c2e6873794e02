"""This rank's piece of each parameter of a segment, as the optimizer sees it.

Every rank has a piece of every parameter, which may be empty. A piece has as many dimensions as the
parameter, since users and optimizers group parameters by the number of dimensions:

- Whole rows of `(6, 4)`: `(rows, 4)`.
- Elements, or blocks of consecutive elements: `(elements, 1)`.
- Rows of the matrices of `(2, 6, 4)`: `(rows, 1, 4)`.
- A 0-d parameter on a rank without its element: `(0,)`.
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
        shape: of the piece in the optimizer.
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
        """Return the piece as a view of a shard, outside autograd."""
        offset = shard.storage_offset() + self.offset
        return shard.detach().as_strided(self.shape, self.stride, offset)

    def flat(self, shard: Tensor) -> Tensor:
        """Return the piece's elements as a 1-D view of a shard."""
        return shard.detach()[self.offset : self.offset + self.numel]


def make_param_shards(plan: ShardPlan, rank: int) -> tuple[ParamShard, ...]:
    """Return one rank's piece of every parameter, in layout order."""
    parts = {part.index: part for part in plan.parts(rank)}
    pieces = []
    for index, (spec, cut) in enumerate(zip(plan.layout.specs, plan.cuts, strict=True)):
        part = parts.get(index)
        offset, start, stop = (part.offset, part.start, part.stop) if part else (0, 0, 0)
        shape, stride = _shape_of(spec, stop - start, plan, cut)
        pieces.append(ParamShard(spec, offset, start, stop, shape, stride))
    return tuple(pieces)


def keeps_dims(plan: ShardPlan) -> bool:
    """Whether pieces only consist of whole rows, blocks or tensors."""
    return plan.boundary != "element" or _is_one_rank(plan)


def stays_whole(plan: ShardPlan, index: int) -> bool:
    """Whether a parameter is never cut, so that one rank has all of it."""
    return _is_one_rank(plan) or plan.cuts[index].whole


def _is_one_rank(plan: ShardPlan) -> bool:
    return plan.world_size == 1


def _shape_of(
    spec: ParamSpec, numel: int, plan: ShardPlan, cut: Cut
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if _is_one_rank(plan) or (cut.whole and numel) or (numel and not spec.shape):
        return spec.shape, spec.stride
    if not spec.shape:
        return (0,), (1,)
    inner = cut.inner or ()
    between = (1,) * (len(spec.shape) - 1 - len(inner))
    shape = (numel // max(1, math.prod(inner)), *between, *inner)
    return shape, contiguous_stride(shape) if between else spec.stride
