"""Which rank has which part of a flat buffer, and of each parameter.

Ranges are in rank order and cover the padded buffer, each element once. With boundary "element" all
have the same length and start aligned, so one collective moves them; elements beyond the layout are
padding and zero. Other boundaries never cut through a row of dim 0, a block or a tensor; the
longest range is then as short as a contiguous cut allows, and exceeds the mean by less than the
largest atom and the gap before it.

Every rank has a piece of every parameter, which may be empty. A piece has as many dimensions as the
parameter, since users and optimizers group parameters by the number of dimensions:

- Whole rows of `(6, 4)`: `(rows, 4)`.
- Elements, or blocks of consecutive elements: `(elements, 1)`.
- Rows of the matrices of `(2, 6, 4)`: `(rows, 1, 4)`.
- A 0-d parameter on a rank without its element: `(0,)`.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from torch import Tensor

from .._errors import LayoutError
from ._boundary import Boundary, Cut, check_boundary, cut_of
from ._layout import FlatLayout, round_up
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


@dataclass(frozen=True)
class ShardPlan:
    """The ranges of a flat buffer, one per rank.

    Args:
        layout: the buffer.
        cuts: how each parameter may be cut, in layout order.
        ranges: `(start, stop)` per rank, elements of the padded buffer.
    """

    layout: FlatLayout
    cuts: tuple[Cut, ...]
    ranges: tuple[tuple[int, int], ...]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.ranges)

    @property
    def numel(self) -> int:
        """Elements of the padded buffer: the sum of all ranges, at least `layout.numel`."""
        return self.ranges[-1][1]

    @cached_property
    def shard_numel(self) -> int:
        """Elements of the longest range."""
        return max(stop - start for start, stop in self.ranges)

    @cached_property
    def even(self) -> bool:
        """Whether all ranges have the same length."""
        return all(stop - start == self.shard_numel for start, stop in self.ranges)

    @property
    def imbalance_frac(self) -> float:
        """How much longer the longest range is than the mean: 0.25 is a quarter longer."""
        return self.shard_numel * self.world_size / max(1, self.numel) - 1

    @property
    def keeps_rows(self) -> bool:
        """Whether a parameter is only cut between rows, blocks or tensors, or not at all."""
        return self.world_size == 1 or any(cut.inner is not None for cut in self.cuts)

    def stays_whole(self, index: int) -> bool:
        """Whether a parameter is never cut, so that one rank has all of it."""
        return self.world_size == 1 or self.cuts[index].whole

    def held(self, index: int, rank: int) -> tuple[int, int]:
        """Elements `[start, stop)` of a parameter that a rank has; `(0, 0)` for none."""
        start, stop = self.ranges[rank]
        offset, numel = self.layout.offsets[index], self.layout.specs[index].numel
        first, last = max(start - offset, 0), min(stop - offset, numel)
        return (first, last) if first < last else (0, 0)

    def piece(self, index: int, rank: int) -> ParamShard:
        """A rank's piece of a parameter."""
        spec, cut = self.layout.specs[index], self.cuts[index]
        start, stop = self.held(index, rank)
        numel = stop - start
        offset = self.layout.offsets[index] + start - self.ranges[rank][0] if numel else 0
        shape, stride = spec.shape, spec.stride
        if self.world_size > 1 and not (numel and (cut.whole or not shape)):
            inner = cut.inner or ()
            between = (1,) * (len(shape) - 1 - len(inner))
            shape = (numel // max(1, math.prod(inner)), *between, *inner)
            stride = contiguous_stride(shape) if between or not stride else stride
        return ParamShard(spec, offset, start, stop, shape, stride)


def plan_shard(layout: FlatLayout, *, world_size: int, boundary: Boundary = "element") -> ShardPlan:
    """Cut a flat buffer into one contiguous range per rank.

    Pure: every rank computes the same plan. O(W), and O(n log n log numel) for other
    boundaries than "element".

    Args:
        layout: the buffer.
        world_size: number of ranks, at least 1.
        boundary: "element" anywhere aligned; "row" between rows of dim 0; "tensor" between
            parameters; `Blocks` between blocks; or rules of `by_name`.

    Raises:
        LayoutError: `world_size` below 1, or an unknown boundary.

    Example:
        >>> import torch
        >>> from flat_param import Blocks
        >>> from flat_param.plan import ParamSpec, plan_layout
        >>> layout = plan_layout([ParamSpec("w", (3, 7), torch.float32)], align_bytes=16)
        >>> plan_shard(layout, world_size=2).ranges
        ((0, 12), (12, 24))
        >>> plan_shard(layout, world_size=2, boundary="row").ranges
        ((0, 14), (14, 24))
        >>> plan_shard(layout, world_size=2, boundary=Blocks(5)).ranges
        ((0, 10), (10, 24))
    """
    if world_size < 1:
        raise LayoutError(
            f"flat_param.plan_shard: world_size is {world_size}, but at least one rank is needed. "
            "Pass the size of the process group."
        )
    check_boundary(boundary)
    cuts = tuple(cut_of(spec, boundary) for spec in layout.specs)
    if all(cut.inner is None for cut in cuts):  # by elements
        size = round_up(-(-layout.numel // world_size), layout.align_numel)
        ranges = tuple((size * rank, size * (rank + 1)) for rank in range(world_size))
    else:
        atoms = [cut.atom_numel for cut in cuts]
        ranges = tuple(_CutPlaces(layout, atoms).ranges(world_size))
    return ShardPlan(layout, cuts, ranges)


@dataclass(frozen=True)
class _CutPlaces:
    """Positions where ranges of a buffer may begin: at atoms of parameters, and at their ends.

    For a given limit, a greedy pass needs the fewest ranges, so a binary search finds the smallest
    limit. Ranges inside one parameter have one length, and are counted instead of walked: the cost
    depends on parameters, not on ranks.

    Args:
        layout: the buffer.
        atoms: for each parameter, elements that stay together.
    """

    layout: FlatLayout
    atoms: Sequence[int]

    def last_before(self, position: int) -> int:
        """The last place at or before `position` where a range may begin."""
        layout = self.layout
        if position >= layout.numel:
            return layout.numel
        index = bisect_right(layout.offsets, position) - 1
        offset, numel = layout.offsets[index], layout.specs[index].numel
        within = position - offset
        return offset + (numel if within >= numel else within - within % self.atoms[index])

    def runs(self, limit: int) -> Iterator[tuple[int, int, int]]:
        """`(start, length, count)` of consecutive ranges of at most `limit` elements.

        They end before the buffer does if an atom is longer than the limit.
        """
        start, total = 0, self.layout.numel
        while start < total:
            length = self.last_before(start + limit) - start
            if length <= 0:
                return
            count = 1 + self._alike(start, length, limit)
            yield start, length, count
            start += length * count

    def _alike(self, start: int, length: int, limit: int) -> int:
        """How many following ranges in the same parameter have the same length."""
        index = bisect_right(self.layout.offsets, start) - 1
        stop = start + length
        end = self.layout.offsets[index] + self.layout.specs[index].numel
        room = end - limit - stop
        return 0 if room <= 0 else (room - 1) // length + 1

    def _fits(self, limit: int, world_size: int) -> bool:
        """Whether so many ranges of at most `limit` elements cover the buffer."""
        ranges, end = 0, 0
        for start, length, count in self.runs(limit):
            ranges, end = ranges + count, start + length * count
        return end >= self.layout.numel and ranges <= world_size

    def ranges(self, world_size: int) -> Iterator[tuple[int, int]]:
        """Return `(start, stop)` per rank; ranks beyond the data have empty ranges at the end."""
        mean, made = -(-self.layout.numel // world_size), 0
        limits = range(mean, self.layout.numel)
        limit = mean + bisect_left(limits, True, key=partial(self._fits, world_size=world_size))
        for start, length, count in self.runs(limit):
            yield from ((start + length * i, start + length * (i + 1)) for i in range(count))
            made += count
        end = self.layout.numel
        yield from ((end, end) for _ in range(world_size - made))
