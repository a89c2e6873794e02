"""Which rank has which part of a flat buffer.

Ranges are in rank order and cover the padded buffer, each element once. With boundary "element" all
have the same length and start aligned, so one collective moves them; elements beyond the layout are
padding and zero. Other boundaries never cut through a row of dim 0, a block or a tensor; the
longest range is then as short as a contiguous cut allows.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import cached_property

from .._errors import LayoutError
from ._boundary import Boundary, Cut, PerParameter, boundaries_of, check_boundary, cut_of
from ._cuts import CutPlaces
from ._layout import FlatLayout, round_up


@dataclass(frozen=True)
class ShardPart:
    """One rank's part of one parameter.

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
        """Number of elements in the part."""
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
        """Elements of the padded buffer: the sum of all ranges, at least `layout.numel`."""
        return self.ranges[-1][1]

    @cached_property
    def shard_numel(self) -> int:
        """Elements of the longest range."""
        return max(stop - start for start, stop in self.ranges)

    @cached_property
    def cuts(self) -> tuple[Cut, ...]:
        """How each parameter may be cut, in layout order."""
        return _cuts(self.layout, self.boundary)

    @cached_property
    def even(self) -> bool:
        """Whether all ranges have the same length."""
        return all(stop - start == self.shard_numel for start, stop in self.ranges)

    @property
    def imbalance_frac(self) -> float:
        """How much longer the longest range is than the mean: 0.25 is a quarter longer."""
        return self.shard_numel * self.world_size / max(1, self.numel) - 1

    def parts(self, rank: int) -> tuple[ShardPart, ...]:
        """Return the nonempty pieces of parameters in one rank's range, in buffer order.

        O(log n + parts).
        """
        return parts_between(self.layout, *self.ranges[rank])


def parts_between(layout: FlatLayout, start: int, stop: int) -> tuple[ShardPart, ...]:
    """The pieces of parameters in `[start, stop)` of a buffer, empty ones left out."""
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

    Pure: every rank computes the same plan. O(W), and O(n log n log numel) for other
    boundaries than "element".

    Args:
        layout: the buffer.
        world_size: number of ranks, at least 1.
        boundary: "element" anywhere aligned; "row" between rows of dim 0; "tensor" between
            parameters; `Blocks` between blocks; `PerParameter` as it says.

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
    check_ranks(world_size)
    check_boundary(boundary)
    boundary = boundary_in(layout, boundary)
    if boundary == "element":
        size = even_numel(layout, world_size)
        ranges = tuple((size * rank, size * (rank + 1)) for rank in range(world_size))
    else:
        ranges = tuple(cut_places(layout, boundary).ranges(world_size))
    return ShardPlan(layout, boundary, ranges)


def even_numel(layout: FlatLayout, world_size: int) -> int:
    """Elements of each rank's range at boundary "element"."""
    return round_up(-(-layout.numel // world_size), layout.align_numel)


def cut_places(layout: FlatLayout, boundary: Boundary) -> CutPlaces:
    """Return where ranges may begin with another boundary than "element"."""
    return CutPlaces(layout, tuple(cut.atom_numel for cut in _cuts(layout, boundary)))


def _cuts(layout: FlatLayout, boundary: Boundary) -> tuple[Cut, ...]:
    each = boundaries_of(boundary, [spec.name for spec in layout.specs])
    pairs = zip(layout.specs, each, strict=True)
    return tuple(cut_of(spec.shape, spec.stride, own) for spec, own in pairs)


def boundary_in(layout: FlatLayout, boundary: Boundary) -> Boundary:
    """The boundary of this buffer; one word if all its parameters have the same."""
    names = [spec.name for spec in layout.specs]
    each = boundaries_of(boundary, names)
    return each[0] if len(set(each)) == 1 else PerParameter(tuple(zip(names, each, strict=True)))


def check_ranks(world_size: int) -> None:
    """Refuse a world size below 1."""
    if world_size < 1:
        raise LayoutError(
            f"flat_param.plan_shard: world_size is {world_size}, but at least one rank is needed. "
            "Pass the size of the process group."
        )
