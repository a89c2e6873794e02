"""Describes the full parameter of a piece; stored as an attribute of the optimizer's parameter."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..buffers._dtensors import DTensorPlace
from ..comm._comm import Communicator
from ..layout._param_shard import ParamShard, keeps_dims
from ..layout._shard import ShardPlan
from ._block_rows import BlockRows, block_rows
from ._stored_shard import Extent, extent_of

if TYPE_CHECKING:
    from ._flat_shard import FlatShard, ShardOwners


class PieceSegment:
    """The segment of some pieces.

    Args:
        plan: which elements each rank has.
        comm: to these ranks.
        device: where whole parameters are.

    Attributes:
        steps: how many steps optimizers have made on the segment's parameters.
    """

    def __init__(self, plan: ShardPlan, comm: Communicator, device: torch.device) -> None:
        self.plan, self.comm, self.device = plan, comm, device
        self.steps = 0

    def ranges(self, index: int) -> tuple[tuple[int, int], ...]:
        """Return `[start, stop)` of one parameter by rank."""
        return tuple(held.get(index, (0, 0)) for held in self._held)

    @cached_property
    def _held(self) -> list[dict[int, tuple[int, int]]]:
        ranks = range(self.plan.world_size)
        return [{p.index: (p.start, p.stop) for p in self.plan.parts(rank)} for rank in ranks]


class ParamPiece:
    """This rank's piece of a parameter. Holds no parameter, so it makes no reference cycle.

    Args:
        shard: the piece.
        index: of the parameter in its segment.
        segment: its segment.
        place: placement by tensor parallelism; None without it.

    Attributes:
        has_grad: whether other ranks have a gradient, if the optimizer skips this rank.
        is_stepped: whether other ranks have optimizer state.
    """

    def __init__(
        self, shard: ParamShard, index: int, segment: PieceSegment, place: DTensorPlace | None
    ) -> None:
        self.shard, self.index, self.segment, self.place = shard, index, segment, place
        self.plan, self.comm, self.device = segment.plan, segment.comm, segment.device
        self.has_grad = self.is_stepped = False

    def follow(self, before: ParamPiece) -> None:
        """Copy optimizer flags and the step count from the piece that this piece replaces."""
        self.has_grad, self.is_stepped = before.has_grad, before.is_stepped
        self.segment.steps = before.segment.steps

    def ranges(self) -> tuple[tuple[int, int], ...]:
        """The elements that each rank has."""
        return self.segment.ranges(self.index)

    @property
    def name(self) -> str:
        """The parameter's name in its unit."""
        return self.shard.spec.name

    @property
    def is_cut(self) -> bool:
        """Whether ranks have different elements of the parameter."""
        return self.plan.world_size > 1 and self.shard.spec.numel > 0

    @property
    def is_plain(self) -> bool:
        """Whether this rank has all of the parameter, as a plain tensor."""
        return self.plan.world_size == 1 and self.place is None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter, before tensor parallelism too."""
        return tuple(self.shard.spec.shape if self.place is None else self.place.shape)

    @property
    def whole_numel(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.shape)

    @property
    def leaves_ranks_out(self) -> bool:
        """Whether the optimizer steps the parameter only on ranks that have elements."""
        return self.is_cut and keeps_dims(self.plan)

    @property
    def skips(self) -> bool:
        """Whether this rank has no elements, and the optimizer skips it."""
        return self.leaves_ranks_out and not self.shard.numel

    @cached_property
    def first_holder(self) -> int:
        """The first rank that has elements."""
        return next((at for at, (start, stop) in enumerate(self.ranges()) if start < stop), 0)

    @cached_property
    def extent(self) -> Extent:
        """The elements of this rank."""
        shard = self.shard
        return extent_of(shard.spec, shard.start, shard.stop, self.place, shard.spec.name)

    @cached_property
    def owners(self) -> ShardOwners:
        """The ranks that have the other elements."""
        from ._flat_shard import ShardOwners

        ranges = partial(self.segment.ranges, self.index)
        return ShardOwners(self.comm, self.device, ranges, self.place)

    @property
    def rows(self) -> BlockRows | None:
        """The blocks that this rank has; None if it has none, or after tensor parallelism."""
        if self.place is not None:
            return None
        return block_rows(self.plan, self.index, self.shard.start, self.shard.stop)

    def present(self, local: Tensor) -> Tensor:
        """Return this rank's elements, 1-D, in the form of a state dict."""
        from ._flat_shard import FlatShard

        if self.is_cut:
            return FlatShard(local, self.extent, self.owners)
        spec = self.shard.spec
        whole = local.as_strided(spec.shape, spec.stride)
        return whole if self.place is None else self.place.over(whole)

    def present_rows(self, rows: Tensor) -> FlatShard:
        """Return state with one row per block of this rank, `(rows, ...)`."""
        from ._flat_shard import FlatShard, ShardOwners

        each = rows[:1].numel() if len(rows) else rows.new_empty(1, *rows.shape[1:]).numel()
        ranges = [self._rows_of(rank) for rank in range(self.plan.world_size)]
        elements = [(first * each, end * each) for first, end in ranges]
        shape = (max(end for _, end in ranges), *rows.shape[1:])
        start, stop = elements[self.comm.rank]
        zeros = (0,) * len(shape)
        extent = Extent(self.name, shape, tuple(range(len(shape))), start, stop, shape, zeros)
        owners = ShardOwners(self.comm, self.device, lambda: elements)
        return FlatShard(rows.detach().contiguous().view(-1), extent, owners)

    def _rows_of(self, rank: int) -> tuple[int, int]:
        rows = block_rows(self.plan, self.index, *self.ranges()[rank])
        return (0, 0) if rows is None else (rows.first, rows.first + rows.count)

    def present_number(self, value: Tensor) -> FlatShard:
        """State without dimensions, such as a step count; the first holder's value counts."""
        from ._flat_shard import FlatShard, ShardOwners

        first = self.first_holder
        writes = self.comm.rank == first
        extent = Extent(self.name, (), (), 0, 1, (), (), writes)
        ranges = [(0, int(rank == first)) for rank in range(self.plan.world_size)]
        owners = ShardOwners(self.comm, self.device, lambda: ranges)
        return FlatShard(value.detach().reshape(1), extent, owners)

    def elements(self, value: Any, name: str = "") -> Tensor:
        """This rank's elements, 1-D, of a state dict's value for the parameter.

        Args:
            value: a whole tensor, a DTensor, a shard, or a shard that was pickled.
            name: of the parameter, for messages.

        Raises:
            StateError: it has other elements, or another shape.
        """
        from ._flat_shard import local_elements

        extent = replace(self.extent, name=name) if name else self.extent
        return local_elements(value, extent, self.owners)
