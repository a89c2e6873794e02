"""This rank's piece of a parameter, and its place in the whole parameter.

The optimizer's parameter, its gradient and elementwise results have it as the attribute `PIECE`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..._errors import StateError
from ...buffers._dtensors import DTensorPlace
from ...buffers._owners import PIECE as PIECE
from ...buffers._views import memory_order, outer_first
from ...comm._comm import Communicator
from ...comm._groups import Spread
from ...layout._boundary import Cut
from ...layout._shard import ShardPlan
from ...layout._spec import ParamSpec, contiguous_stride
from ._extent import Extent

if TYPE_CHECKING:
    from ._flat_shard import FlatShard


@cache
def _shards() -> Any:
    """The module of `FlatShard`, which is imported late since DTensors are slow to import."""
    from . import _flat_shard

    return _flat_shard


def piece_of(tensor: Any) -> ParamPiece | None:
    """The piece that a tensor is; None if it is not sharded."""
    piece: ParamPiece | None = getattr(tensor, PIECE, None)
    return piece


def mark_replaced(param: Tensor, *, name: str) -> None:
    """Mark a parameter that was replaced in its module."""
    param._flat_param_replaced = name  # type: ignore[attr-defined]  # our own mark


def mark_shown(leaf: Tensor, *, label: str) -> None:
    """Mark a full parameter that `unshard` shows, whose updates are lost when it is resharded."""
    leaf._flat_param_shown = label  # type: ignore[attr-defined]  # our own mark


@dataclass(eq=False)
class PieceSegment:
    """The segment of some pieces.

    Attributes:
        plan: which elements each rank has.
        comm: to these ranks.
        replicate: to ranks with the same pieces.
        device: where whole parameters are.
        steps: how many steps optimizers have made on the segment's parameters.
    """

    plan: ShardPlan
    comm: Communicator
    replicate: Communicator
    device: torch.device
    steps: int = 0


class ParamPiece:
    """This rank's piece of a parameter. Holds no parameter, so it makes no reference cycle.

    Every rank has a piece of every parameter, which may be empty. A piece has as many dimensions as
    the parameter, since users and optimizers group parameters by the number of dimensions:

    - Whole rows of `(6, 4)`: `(rows, 4)`.
    - Elements, or blocks of consecutive elements: `(elements, 1)`.
    - Rows of the matrices of `(2, 6, 4)`: `(rows, 1, 4)`.
    - A 0-d parameter on a rank without its element: `(0,)`.

    Args:
        index: of the parameter in its segment.
        segment: its segment.
        place: placement by tensor parallelism; None without it.
        spread: communicators of all ranks over which the parameter is cut.

    Attributes:
        spec: the parameter, after tensor parallelism.
        shape: of the whole parameter, before tensor parallelism.
        start: its first element here, in memory order.
        stop: one past its last element here.
        offset: of the first element in the shard.
        piece_shape: shape in the optimizer.
        piece_stride: stride in the shard.
        is_cut: whether ranks have different elements of it.
        stays_whole: whether one rank has all of it, also before tensor parallelism.
        is_whole: whether this is that rank.
        holds_all: whether no other rank has elements of it, after tensor parallelism.
        is_parallel: whether tensor parallelism cuts it.
        leaves_ranks_out: whether the optimizer steps it only on ranks that have elements: those
            that need full tensors would divide by zero elements elsewhere.
        skips: whether the optimizer skips this rank.
        is_stepped: whether other ranks step it, if the optimizer skips this one.
        specs: of its shards in state dicts, see _flat_shard.py.
    """

    def __init__(
        self,
        index: int,
        segment: PieceSegment,
        *,
        place: DTensorPlace | None,
        spread: Spread,
    ) -> None:
        self.index, self.segment, self.place, self.spread = index, segment, place, spread
        self.plan, self.comm = segment.plan, segment.comm
        plan, spec = self.plan, self.plan.layout.specs[index]
        self.spec = spec
        self.name = spec.name
        self.shape = tuple(spec.shape if place is None else place.shape)
        self.start, self.stop = plan.held(index, self.comm.rank)
        self.numel = self.stop - self.start
        first = plan.layout.offsets[index] + self.start
        self.offset = first - plan.ranges[self.comm.rank][0] if self.numel else 0
        self.piece_shape, self.piece_stride = _shape_of(spec, self.numel, plan, plan.cuts[index])
        self.is_cut = plan.world_size > 1 and spec.numel > 0
        alone = plan.world_size == 1 or plan.cuts[index].whole
        self.is_parallel = any(comm.world_size > 1 for comm in spread[1:])
        self.stays_whole = alone and not self.is_parallel
        self.holds_all = alone and self.numel == spec.numel
        self.is_whole = self.stays_whole and self.holds_all
        self.leaves_ranks_out = self.is_cut and plan.keeps_rows
        self.skips = self.leaves_ranks_out and not self.numel
        self.is_stepped = False
        self.specs: dict[Any, Any] = {}

    def __deepcopy__(self, memo: object) -> ParamPiece:
        return self  # gradients have it as an attribute

    @cached_property
    def may_miss_ranks(self) -> bool:
        """Whether optimizers skip it on a rank, which then takes part in no reduction."""
        return self.leaves_ranks_out and any(start == stop for start, stop in self.ranges())

    @property
    def all_comms(self) -> Spread:
        """Communicators to ranks that step other elements, or the same ones."""
        return (*self.spread, self.segment.replicate)

    @torch.no_grad()
    def cut(self, whole: Tensor, like: Tensor) -> Tensor:
        """This rank's elements of a whole tensor, in the shape and stride of `like`."""
        if self.place is not None:
            whole = self.place.local_of_value(whole)
        elements = memory_order(whole, self.spec.stride)[self.start : self.stop]
        return elements.contiguous().as_strided(like.shape, like.stride())

    def view(self, shard: Tensor) -> Tensor:
        """Return the piece as a view of a shard, outside autograd."""
        offset = shard.storage_offset() + self.offset
        return shard.detach().as_strided(self.piece_shape, self.piece_stride, offset)

    def flat(self, shard: Tensor) -> Tensor:
        """Return the piece's elements as a 1-D view of a shard."""
        return shard.detach()[self.offset : self.offset + self.numel]

    @property
    def label(self) -> str:
        """Name and unit for messages; `name` is relative to the unit."""
        return f"'{self.name}' of {self.comm.unit}" if self.comm.unit else f"'{self.name}'"

    @property
    def device(self) -> torch.device:
        """Where the whole parameter is."""
        return self.segment.device

    @property
    def is_plain(self) -> bool:
        """Whether this rank has all of the parameter, as a plain tensor."""
        return self.plan.world_size == 1 and self.place is None

    def outside_unit(self, where: str) -> StateError:
        """The error for a piece that is used as a full parameter, outside of its unit's forward."""
        return StateError(
            f"flat_param.fully_shard: parameter '{self.name}' is a piece of shape "
            f"{self.piece_shape} where {where}, but only a call of {self.comm.unit} makes it "
            f"whole, {tuple(self.spec.shape)}. Call that module, make the module that computes "
            "with it a unit of its own, do not shard it by itself, or read the parameter between "
            "unshard() and reshard()."
        )

    def ranges(self) -> list[tuple[int, int]]:
        """The elements `[start, stop)` that each rank has."""
        ranks = range(self.plan.world_size)
        return [self.plan.held(self.index, rank) for rank in ranks]

    @cached_property
    def first_holder(self) -> int:
        """The first rank that has elements."""
        return next((at for at, (start, stop) in enumerate(self.ranges()) if start < stop), 0)

    @cached_property
    def extent(self) -> Extent:
        """The elements of this rank."""
        offsets = (0,) * len(self.shape) if self.place is None else self.place.offsets
        shape, order = tuple(self.spec.shape), tuple(outer_first(self.spec.stride))
        return Extent(self.name, shape, order, self.start, self.stop, self.shape, offsets)

    @cached_property
    def _block(self) -> int:
        """Elements between two places where the parameter may be cut; 0 without such places."""
        if not self.is_cut or self.place is not None:
            return 0
        return self.plan.cuts[self.index].block_numel

    @property
    def has_whole_blocks(self) -> bool:
        """Whether it is cut between rows or blocks, in which optimizers may compute."""
        return (self._block > 1 or self.plan.keeps_rows) and not self.is_parallel

    @property
    def blocks(self) -> int:
        """Blocks of the parameter, between which it may be cut. The last one may be short."""
        return -(-self.spec.numel // self._block) if self._block else 0

    def has_rows(self, key: str, state: Any, *, whole: bool = False) -> bool:
        """Whether state of the piece, or of the whole parameter, has one row per block.

        8-bit optimizers have such state: the scales of their moments.
        """
        if key == "step" or not self._block or not state.dim():
            return False
        rows = self.blocks if whole else self.held_blocks
        return state.shape[0] == rows if state.numel() else not self.numel

    @property
    def held_blocks(self) -> int:
        """Blocks that this rank has."""
        return -(-self.stop // self._block) - self.start // self._block

    def present(self, local: Tensor) -> Tensor:
        """Return this rank's elements, 1-D, in the form of a state dict."""
        if self.is_cut:
            return self._as_shard(local, self.extent)
        whole = local.as_strided(self.spec.shape, self.spec.stride)
        return whole if self.place is None else self.place.over(whole)

    def present_rows(self, rows: Tensor) -> FlatShard:
        """Return state with one row per block of this rank, `(rows, ...)`."""
        extent, ranges = self._extent_of_rows(rows.shape[1:])
        return self._as_shard(rows.detach().contiguous().view(-1), extent, ranges)

    def _extent_of_rows(self, inner: tuple[int, ...]) -> tuple[Extent, list[tuple[int, int]]]:
        each, block = math.prod(inner), self._block
        ranges = [
            (start // block * each, -(-stop // block) * each) for start, stop in self.ranges()
        ]
        shape = (self.blocks, *inner)
        order, zeros = tuple(range(len(shape))), (0,) * len(shape)
        return Extent(self.name, shape, order, *ranges[self.comm.rank], shape, zeros), ranges

    def present_number(self, value: Tensor) -> FlatShard:
        """State without dimensions, such as a step count; the first holder's value counts."""
        ranges = [(0, int(rank == self.first_holder)) for rank in range(self.plan.world_size)]
        writes = self.comm.rank == self.first_holder
        extent = Extent(self.name, (), (), 0, 1, (), (), writes)
        return self._as_shard(value.detach().reshape(1), extent, ranges)

    def _as_shard(
        self, local: Tensor, extent: Extent, ranges: Sequence[tuple[int, int]] | None = None
    ) -> FlatShard:
        found: FlatShard = _shards().FlatShard(local, extent, self, ranges)
        return found

    def elements(self, value: Any, name: str = "") -> Tensor:
        """This rank's elements, 1-D, of a state dict's value; raises if it does not have them."""
        extent = replace(self.extent, name=name) if name else self.extent
        found: Tensor = _shards().local_elements(value, extent, self.place)
        return found

    def rows_of(self, value: Any) -> Tensor:
        """This rank's rows of state with one row per block, like `elements`."""
        inner = tuple(value.shape[1:])
        extent, _ = self._extent_of_rows(inner)
        found: Tensor = _shards().local_elements(value, extent, None).view(-1, *inner)
        return found


@dataclass(frozen=True, eq=False)
class JoinedPieces:
    """The pieces of some parameters in one tensor, as LBFGS joins them.

    Attributes:
        spread: communicators of all ranks over which the parameters are cut.
        device: where whole parameters are.
    """

    spread: Spread
    device: torch.device
    label = "tensors that are joined"
    holds_all = is_whole = may_miss_ranks = False

    @property
    def all_comms(self) -> Spread:
        """The same."""
        return self.spread

    def __deepcopy__(self, memo: object) -> JoinedPieces:
        return self


def _shape_of(
    spec: ParamSpec, numel: int, plan: ShardPlan, cut: Cut
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and stride of a piece with `numel` elements."""
    if plan.world_size == 1 or (cut.whole and numel) or (numel and not spec.shape):
        return spec.shape, spec.stride
    if not spec.shape:
        return (0,), (1,)
    inner = cut.inner or ()
    between = (1,) * (len(spec.shape) - 1 - len(inner))
    shape = (numel // max(1, math.prod(inner)), *between, *inner)
    return shape, contiguous_stride(shape) if between else spec.stride
