"""One segment's parameters on this rank: the shard, and the full buffer while in use.

    shard  (shard,)        storage dtype; always allocated; the optimizer's parameters view it.
    full   (world*shard,)  compute dtype; its storage is resized to 0 while not in use, so the
                           leaves, which view it, are made once.

With one rank and no cast, `full` is `shard`. With a cast, one rank also has a separate `full`, so
results do not depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from ..._errors import ParameterError
from ..._torch_compat import without_torch_function
from ...buffers._dtensors import as_plain, local_of, place_of_dtensor
from ...buffers._views import ParamViews, memory_order, param_views
from ...comm._clip import spread_of
from ...comm._comm import Pending
from ...comm._groups import CommGroups
from ...comm._streams import SideWork, home_stream, is_capturing, side_stream
from ...layout._layout import Segment
from ...layout._options import UnitOptions, compute_dtype
from ...layout._shard import plan_shard
from ..tensor._param_piece import ParamPiece, PieceSegment
from ..tensor._piece_tensors import be_piece


class ShardedParams:
    """The parameters of one segment.

    Args:
        segment: names, shapes and offsets.
        params: full; each object becomes this rank's piece, except DTensors, which are replaced
            by plain parameters.
        comms: the unit's process groups.
        options: of the unit.
        device: of full parameters.

    Attributes:
        held: the optimizer's parameters as views of the shard.
        leaves: the full parameters that the module computes with, in layout order.
        pieces: the piece of each parameter.
    """

    def __init__(
        self,
        segment: Segment,
        params: Sequence[nn.Parameter],
        *,
        comms: CommGroups,
        options: UnitOptions,
        device: torch.device,
    ) -> None:
        self.segment = segment
        self.comms = comms
        self.options = options
        self.device = device
        world_size = comms.gather.world_size
        self.plan = plan_shard(segment.layout, world_size=world_size, boundary=options.boundary)
        self.pieces = self._make_pieces(params)
        home = torch.device("cpu") if options.cpu_offload else device
        dtype, numel = segment.layout.dtype, self.plan.shard_numel
        self.shard = torch.zeros(numel, dtype=dtype, device=home, pin_memory=self.pins(home))
        self.held = self._move_into_shard(params)
        self._mark_params()
        self._users: list[torch.Stream] = []  # streams that read the full buffer
        self._is_captured = False  # whether they do so in a graph
        self._copy: SideWork | None = None
        self._make_full()

    @torch.no_grad()
    def _move_into_shard(self, params: Sequence[nn.Parameter]) -> ParamViews:
        """Copy one parameter after another, so that only one is in memory twice."""
        views = [piece.view(self.shard) for piece in self.pieces]
        moved = []
        for index, param in enumerate(params):
            self.load_full(index, param.detach())
            moved.append(as_plain(param, views[index]))
        return ParamViews(moved, views)

    def _make_pieces(self, params: Sequence[nn.Parameter]) -> tuple[ParamPiece, ...]:
        comms = self.comms
        segment = PieceSegment(self.plan, comms.gather, comms.replicate, self.device)
        made = []
        for index, place in enumerate(map(place_of_dtensor, params)):
            spread = (comms.reduce, *spread_of(place, comms.log))
            made.append(ParamPiece(index, segment, place=place, spread=spread))
        return tuple(made)

    def _mark_params(self) -> None:
        for param, piece in zip(self.held.params, self.pieces, strict=True):
            be_piece(param, piece)

    def _make_full(self) -> None:
        dtype = compute_dtype(self.options.precision, self.shard.dtype)
        alone = self.comms.gather.world_size == 1
        if alone and dtype == self.shard.dtype and self.shard.device == self.device:
            self.full = self.shard
        else:
            self.full = torch.empty(self.plan.numel, dtype=dtype, device=self.device)
        # `.data` gives each leaf a version counter: filling the buffer again before backward must
        # not look like a change of the weights that autograd saved.
        views = param_views(self.full, self.segment.layout)
        leaves = [
            nn.Parameter(self.placed(index, view.data), requires_grad=self.segment.trainable)
            for index, view in enumerate(views)
        ]
        self.leaves = tuple(leaves)
        self.free()

    def placed(self, index: int, local: Tensor) -> Tensor:
        """Return a parameter as the module has it; `local` is this rank's part."""
        place = self.pieces[index].place
        return local if place is None else place.over(local)

    def pins(self, home: torch.device) -> bool:
        """Whether memory there is page-locked, for copies to and from another device."""
        goes = home.type == "cpu" and self.device.type not in ("cpu", "meta")
        return goes and self.options.pin_memory

    @property
    def aliased(self) -> bool:
        """Whether the full buffer is the shard, so that nothing is gathered or freed."""
        return self.full is self.shard

    @property
    def version(self) -> int:
        """A number that changes with every in-place change of a parameter, and with every step.

        Steps count on all ranks, also on those without elements.
        """
        with without_torch_function():
            versions = sum([param._version for param in self.held.params])
        return versions + self.pieces[0].segment.steps

    def start_gather(self, *, waits: bool = True) -> Pending | None:
        """Begin to fill the full buffer from every rank's shard. Collective.

        `waits`: see `gather_into`.
        """
        return None if self.aliased else self.gather_into(self.full, waits=waits)

    def use(self) -> None:
        """Read the full buffer on the current stream, after it was gathered."""
        here = None if self.aliased else home_stream(self.device)
        if here is not None and here not in self._users:
            if self._users:
                here.wait_stream(self._users[0])  # that one has waited for the gather
            else:
                self._is_captured = is_capturing(self.device)
            self._users.append(here)

    def gather_into(self, full: Tensor, *, waits: bool = True) -> Pending:
        """Begin to fill `full` (world*shard,), of any dtype. Collective.

        On an accelerator all work is on a side stream, which also owns the memory of the full
        buffer. Before that stream reuses the memory, it waits for the streams that have read it,
        see `free`.

        Args:
            full: the buffer; its storage is allocated if it is free.
            waits: whether the gather begins after the work that is queued on the current stream,
                which may change the shard.
        """
        if full.device.type == "cpu":
            return self._gather(full)
        with SideWork(full.device, "in", waits=waits) as work:
            pending = self._gather(full)
            if pending.work is None or pending.device is not None:
                pending.wait()  # the side stream waits
            else:
                pending.home = work.stream  # the host will wait, as with gloo
        self._copy = None if self.shard.device == full.device else work
        return pending.then(work.wait)

    def _gather(self, full: Tensor) -> Pending:
        if not full.untyped_storage().nbytes():
            full.untyped_storage().resize_(full.nbytes)
        comm, plan, part = self.comms.gather, self.plan, self.shard
        staged = full if plan.even else full.new_empty(plan.world_size * plan.shard_numel)
        if part.device != full.device and comm.world_size == 1 and part.dtype == full.dtype:
            part = full.copy_(part, non_blocking=True)
        else:
            part = part.to(full.device, non_blocking=True).to(full.dtype)
        pending = comm.all_gather(as_bytes(staged), as_bytes(part))
        return pending if staged is full else pending.then(partial(self._unstage, full, staged))

    def synchronize(self) -> None:
        """Wait on the host for the last copy of the shard, so that the shard may be changed."""
        if self._copy is not None:
            self._copy.synchronize()

    def _unstage(self, full: Tensor, staged: Tensor) -> None:
        rows = staged.view(self.plan.world_size, self.plan.shard_numel)
        for row, (start, stop) in zip(rows, self.plan.ranges, strict=True):
            full[start:stop].copy_(row[: stop - start])

    def remake(self) -> None:
        """Replace buffer and leaves; the old memory lives as long as its users."""
        if not self.aliased:
            self._make_full()

    def attach_leaves(self) -> None:
        """Give leaves that have other memory, as after `leaf.data = ...`, the full buffer again."""
        memory = self.full.untyped_storage().data_ptr()
        for leaf, view in zip(
            map(local_of, self.leaves), param_views(self.full, self.segment.layout), strict=True
        ):
            if leaf.untyped_storage().data_ptr() != memory:
                leaf.data = view.data

    def free(self) -> None:
        """Free the full buffer's memory; the leaves stay, and are valid after the next gather."""
        if not self.aliased:
            is_foreign = is_capturing(self.device) and not self._is_captured
            for stream in self._users:
                if is_foreign:  # no stream of a capture can wait for work before it
                    self.full.record_stream(stream)
                else:
                    side_stream(self.device, "in").wait_stream(stream)
            self._users = []
            self.full.untyped_storage().resize_(0)

    @torch.no_grad()
    def load_full(self, index: int, whole: Tensor) -> None:
        """Copy this rank's piece of a full parameter, of any dtype. Not a collective."""
        piece = self.pieces[index]
        whole = whole if piece.place is None else piece.place.local_of_value(whole)
        if piece.numel:
            elements = memory_order(whole, piece.spec.stride)[piece.start : piece.stop]
            piece.flat(self.shard).copy_(elements)

    def take_moved(self, moved: Sequence[int]) -> None:
        """Copy values that parameters have in other memory into the shard."""
        for index in moved:
            values, view = self.held.params[index].detach(), self.held.views[index]
            if values.shape != view.shape:
                self.held.attach(index)
                label = self.pieces[index].label
                raise ParameterError(
                    f"flat_param.fully_shard: the data of parameter {label} was replaced by a "
                    f"tensor of shape {tuple(values.shape)}, but this rank's piece has "
                    f"{tuple(view.shape)}. The piece is back. Load full values by "
                    "load_state_dict, or write them under whole_params(write_back=True)."
                )
            self.held.take(index, values)

    @torch.no_grad()
    def write(self, index: int, elements: Tensor) -> None:
        """Copy this rank's elements of a parameter, 1-D, into the shard. Not a collective."""
        self.pieces[index].flat(self.shard).copy_(elements)

    @torch.no_grad()
    def rebind(self, tensors: Sequence[Tensor]) -> None:
        """Use pieces of another dtype or device, after `.to()`."""
        dtype, home = tensors[0].dtype, tensors[0].device
        numel, pinned = self.plan.shard_numel, self.pins(home)
        moved = torch.zeros(numel, dtype=dtype, device=home, pin_memory=pinned)
        views = [piece.view(moved) for piece in self.pieces]
        for view, tensor in zip(views, tensors, strict=True):
            view.copy_(tensor)
        self.held.follow(views)
        remade = dtype != self.shard.dtype or home != self.shard.device or self.aliased
        self.device = self.device if self.options.cpu_offload else moved.device
        self.shard = moved
        if remade:
            self._make_full()
        self.pieces[0].segment.device = self.device
        self._mark_params()


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a flat tensor of any dtype as bytes, so that every backend can move it."""
    return tensor.view(torch.uint8)
