"""A segment of a unit as one rank has it, and its bytes: what plans are added up from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from .layout._boundary import Boundary, boundaries_of, check_boundary
from .layout._boundary_rules import BoundaryRules, resolve
from .layout._layout import Segment, plan_segments
from .layout._options import Precision
from .layout._shard import (
    boundary_in,
    check_ranks,
    cut_places,
    even_numel,
    parts_between,
)
from .layout._spec import ParamSpec


@dataclass(frozen=True)
class Part:
    """A segment of a unit, as one of W ranks has it.

    Args:
        segment: all of it.
        ways: W.
        shard_numel: of the longest range.
        numel: of the padded buffer.
        pieces: elements of each parameter that the rank has some of, and whether its state is a
            number, which stays with the optimizer.
    """

    segment: Segment
    ways: int
    shard_numel: int
    numel: int
    pieces: tuple[tuple[int, bool], ...]

    def shard_bytes(self, dtype: torch.dtype) -> int:
        """Of the longest range."""
        return self.shard_numel * dtype.itemsize

    def whole_bytes(self, dtype: torch.dtype) -> int:
        """Of the padded buffer."""
        return self.numel * dtype.itemsize

    @property
    def used_bytes(self) -> int:
        """Of the parameters that the rank has."""
        return sum(numel for numel, _ in self.pieces) * self.dtype.itemsize

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters."""
        return self.segment.layout.dtype

    def gathered_bytes(self, precision: Precision) -> int:
        """Of the whole buffer; none where the shard itself serves."""
        dtype = precision.compute_dtype(self.dtype)
        alias = self.ways == 1 and dtype == self.dtype
        return 0 if alias else self.whole_bytes(dtype)

    def message_bytes(self, precision: Precision) -> int:
        """Of what a rank gives to a gather."""
        return self.shard_bytes(precision.compute_dtype(self.dtype))

    def whole_grad_bytes(self, precision: Precision) -> int:
        """Of the whole gradients; none where they are frozen."""
        dtype = precision.reduction_dtype(self.dtype)
        return self.whole_bytes(dtype) if self.segment.trainable else 0


def parts_of(
    specs: Sequence[ParamSpec],
    ways: int,
    chosen: Boundary | BoundaryRules,
    rank: int,
) -> tuple[Part, ...]:
    segments = plan_segments(specs) if specs else ()
    if isinstance(chosen, BoundaryRules):
        chosen = replace(chosen, missing_ok=True)  # a plan is of all units
    boundary = resolve(chosen, specs, None)
    return tuple(_part(segment, ways, boundary, rank) for segment in segments)


def _part(segment: Segment, ways: int, boundary: Boundary, rank: int) -> Part:
    layout = segment.layout
    check_ranks(ways)
    check_boundary(boundary)
    boundary = boundary_in(layout, boundary)
    if boundary == "element":
        longest = even_numel(layout, ways)
        numel, start, stop = ways * longest, rank * longest, (rank + 1) * longest
    else:
        places = cut_places(layout, boundary)
        longest, numel = places.shortest_longest(ways), layout.numel
        start, stop = _range(places.runs(longest), rank, numel)
        longest = max(length for _, length, _ in places.runs(longest))
    own = boundaries_of(boundary, [spec.name for spec in layout.specs])
    whole = [ways == 1 or each != "element" for each in own]  # if it is a number
    pieces = tuple(
        (part.numel, whole[part.index] and not layout.specs[part.index].shape)
        for part in parts_between(layout, start, stop)
    )
    return Part(segment, ways, longest, numel, pieces)


def _range(runs: Iterable[tuple[int, int, int]], rank: int, end: int) -> tuple[int, int]:
    """One rank's, of runs of ranges that are alike."""
    for start, length, count in runs:
        if rank < count:
            return start + rank * length, start + (rank + 1) * length
        rank -= count
    return end, end
