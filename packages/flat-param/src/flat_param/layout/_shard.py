"""Which rank keeps which part of a flat buffer.

Rule 1: ranges are in rank order and cover the padded buffer exactly, each element once.
Rule 2: boundary "element" gives every rank the same numel, and every range starts aligned, so one
collective moves them; what the last ranks hold beyond the layout is padding and zero.
Rule 3: boundaries "row" and "tensor" never cut through a row of dim 0 or a tensor. Ranges then
differ in length, and the longest is as short as a contiguous cut allows.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

from .._errors import LayoutError
from ._layout import FlatLayout, round_up

Boundary = Literal["element", "row", "tensor"]


@dataclass(frozen=True)
class ShardPart:
    """What one rank holds of one parameter.

    Args:
        index: position of the parameter in `layout.specs`.
        offset: first element in the shard.
        start: first element of the parameter, in memory order.
        stop: one past the last element of the parameter.
    """

    index: int
    offset: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Elements of the parameter that are here."""
        return self.stop - self.start


@dataclass(frozen=True)
class ShardPlan:
    """The ranges of a flat buffer, one per rank.

    Args:
        layout: the buffer.
        boundary: where a range may begin.
        ranges: `(start, stop)` per rank, elements of the padded buffer.
    """

    layout: FlatLayout
    boundary: Boundary
    ranges: tuple[tuple[int, int], ...]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.ranges)

    @property
    def numel(self) -> int:
        """Elements of the padded buffer: the ranges' sum, at least `layout.numel`."""
        return self.ranges[-1][1]

    @property
    def shard_numel(self) -> int:
        """Elements of the longest range."""
        return max(stop - start for start, stop in self.ranges)

    @property
    def even(self) -> bool:
        """Whether all ranges have the same length."""
        return all(stop - start == self.shard_numel for start, stop in self.ranges)

    @property
    def imbalance_frac(self) -> float:
        """How much longer the longest range is than the mean: 0.25 is a quarter longer."""
        return self.shard_numel * self.world_size / max(1, self.numel) - 1

    def parts(self, rank: int) -> tuple[ShardPart, ...]:
        """The pieces of parameters in one rank's range, in buffer order; empty ones left out.

        O(log n + parts).
        """
        return parts_between(self.layout, *self.ranges[rank])


def parts_between(layout: FlatLayout, start: int, stop: int) -> tuple[ShardPart, ...]:
    """The pieces of parameters in `[start, stop)` of a buffer, empty ones left out.

    Example:
        >>> import torch
        >>> from flat_param import ParamSpec, plan_layout
        >>> layout = plan_layout([ParamSpec("w", (6,), torch.float32)], align_bytes=1)
        >>> parts_between(layout, 4, 9)
        (ShardPart(index=0, offset=0, start=4, stop=6),)
    """
    parts: list[ShardPart] = []
    begin = max(0, bisect_right(layout.offsets, start) - 1)
    for index in range(begin, bisect_left(layout.offsets, stop)):
        offset = layout.offsets[index]
        first = max(start, offset)
        last = min(stop, offset + layout.specs[index].numel)
        if first < last:
            parts.append(ShardPart(index, first - start, first - offset, last - offset))
    return tuple(parts)


def plan_shard(layout: FlatLayout, *, world_size: int, boundary: Boundary = "element") -> ShardPlan:
    """Cut a flat buffer into one contiguous range per rank.

    Pure: every rank computes the same plan. O(W) for "element", else O(W log n log numel).

    Args:
        layout: the buffer.
        world_size: number of ranks, at least 1.
        boundary: "element" anywhere aligned; "row" between rows of dim 0; "tensor" between
            parameters (Rules 2 and 3).

    Raises:
        LayoutError: `world_size` below 1, or an unknown boundary.

    Example:
        >>> import torch
        >>> from flat_param import ParamSpec, plan_layout
        >>> layout = plan_layout([ParamSpec("w", (3, 7), torch.float32)], align_bytes=16)
        >>> plan_shard(layout, world_size=2).ranges
        ((0, 12), (12, 24))
        >>> plan_shard(layout, world_size=2, boundary="row").ranges
        ((0, 14), (14, 24))
    """
    _check(world_size, boundary)
    if boundary == "element":
        size = round_up(-(-layout.numel // world_size), layout.align_numel)
        cuts = [size * rank for rank in range(world_size + 1)]
    else:
        cuts = _shortest_longest(layout, world_size, boundary)
    return ShardPlan(layout, boundary, tuple(pairwise(cuts)))


def _check(world_size: int, boundary: str) -> None:
    if world_size < 1:
        raise LayoutError(
            f"flat_param.plan_shard: world_size is {world_size}, but at least one rank is needed. "
            "Pass the size of the process group."
        )
    if boundary not in get_args(Boundary):
        raise LayoutError(
            f"flat_param.plan_shard: boundary is {boundary!r}, but it must be one of "
            f"{', '.join(get_args(Boundary))}. Use 'element' for elementwise optimizers."
        )


def _shortest_longest(layout: FlatLayout, world_size: int, boundary: Boundary) -> list[int]:
    """Cuts whose longest range is minimal: bisection on its length, greedy for each guess."""
    low, high = -(-layout.numel // world_size), layout.numel
    while low < high:
        guess = (low + high) // 2
        if _greedy(layout, world_size, boundary, guess)[-1] == layout.numel:
            high = guess
        else:
            low = guess + 1
    return _greedy(layout, world_size, boundary, high)


def _greedy(layout: FlatLayout, world_size: int, boundary: Boundary, limit: int) -> list[int]:
    """Make each range as long as `limit` allows; the last cut tells how far that went."""
    cuts = [0]
    for _ in range(world_size):
        cuts.append(max(cuts[-1], _cut_before(layout, boundary, cuts[-1] + limit)))
    return cuts


def _cut_before(layout: FlatLayout, boundary: Boundary, position: int) -> int:
    """The last place at or before `position` where a range may begin (Rule 3)."""
    if position >= layout.numel:
        return layout.numel
    index = bisect_right(layout.offsets, position) - 1
    offset, spec = layout.offsets[index], layout.specs[index]
    unit_numel = spec.row_numel if boundary == "row" else max(1, spec.numel)
    within = min(position - offset, spec.numel)
    return offset + within - within % unit_numel
