"""Which rank has which part of a flat buffer, and of each parameter.

Ranges are in rank order and cover the padded buffer, each element once. With boundary "element" all
have the same length and start aligned, so one collective moves them; elements beyond the layout are
padding and zero. Other boundaries never cut through a row of dim 0, a block or a tensor; the
longest range is then as short as a contiguous cut allows, and exceeds the mean by less than the
largest atom and the gap before it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise

from .._errors import LayoutError
from ._boundary import Boundary, Cut, check_boundary, cut_of
from ._layout import FlatLayout, round_up


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

    def held(self, index: int, rank: int) -> tuple[int, int]:
        """Elements `[start, stop)` of a parameter that a rank has; `(0, 0)` for none."""
        start, stop = self.ranges[rank]
        offset, numel = self.layout.offsets[index], self.layout.specs[index].numel
        first, last = max(start - offset, 0), min(stop - offset, numel)
        return (first, last) if first < last else (0, 0)


def plan_shard(layout: FlatLayout, *, world_size: int, boundary: Boundary = "element") -> ShardPlan:
    """Cut a flat buffer into one contiguous range per rank.

    Pure: every rank computes the same plan. O(W), and O(W log n log numel) for other boundaries
    than "element".

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
    limit.

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

    def starts(self, limit: int, world_size: int) -> list[int]:
        """Where each rank's range begins, if none has more than `limit` elements, and the end.

        The end is before that of the buffer if ranks or atoms are too large for the limit.
        """
        starts = [0]
        for _ in range(world_size):
            starts.append(self.last_before(starts[-1] + limit))
        return starts

    def _fits(self, limit: int, world_size: int) -> bool:
        """Whether so many ranges of at most `limit` elements cover the buffer."""
        return self.starts(limit, world_size)[-1] == self.layout.numel

    def ranges(self, world_size: int) -> Iterator[tuple[int, int]]:
        """Return `(start, stop)` per rank; ranks beyond the data have empty ranges at the end."""
        mean = -(-self.layout.numel // world_size)
        limits = range(mean, self.layout.numel)
        limit = mean + bisect_left(limits, True, key=partial(self._fits, world_size=world_size))
        return pairwise(self.starts(limit, world_size))
