"""One segment of a unit on this rank: its shard, its full parameters, and their gradients.

    shard      (shard,)        storage dtype; always allocated; the optimizer's parameters view it.
    full       (world*shard,)  compute dtype; its storage is resized to 0 while not in use, so the
                               leaves, which view it, are made once.
    full_grad  (world*shard,)  reduce dtype; this rank's gradients, from the first one of a backward
                               until they are reduced; borrowed from a pool. One rank reduces
                               nothing, so there it becomes `reduced`.
    reduced    (shard,)        reduce dtype, then that of the parameters; new for each backward.
                               `.grad` is a view of it, or has it added.

- With one rank and no cast, `full` is `shard`. With a cast, one rank also has a separate `full`, so
  results do not depend on the number of ranks.
- A frozen segment has no gradients. A parameter that no rank used keeps its previous `.grad`.
- Only `.grad` refers to the memory of gradients. So they are freed with `.grad`, and users may keep
  them.
- autograd only sees the leaves, so post-accumulate hooks of the optimizer's parameters are called
  once `.grad` is set.
- Gradients are handled on the stream on which the leaves' gradients arrive, which autograd chooses.
  Buffers are allocated there, so no other stream waits for them.
- Until replicas are reduced, this rank's sum, `(shard,)`, is kept and added to the next one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from ..._errors import ParameterError
from ..._torch_compat import post_accumulate_grad_hooks, without_torch_function
from ...buffers._dtensors import as_plain, local_of, place_of_dtensor
from ...buffers._views import memory_order, param_views
from ...comm._comm import BufferPool, Pending
from ...comm._groups import CommGroups, spread_of
from ...comm._streams import (
    HERE,
    Home,
    SideWork,
    home_of,
    is_capturing,
    side_stream,
)
from ...layout._layout import Segment
from ...layout._options import UnitOptions, compute_dtype, reduction_dtype
from ...layout._shard import plan_shard
from ..tensor._param_piece import PIECE, ParamPiece, PieceSegment
from ..tensor._piece_tensors import Piece, be_piece

LeafHook = Callable[["weakref.ref[ShardedSegment]", int, Tensor], None]


class ShardedSegment:
    """Some parameters of a unit that are in one buffer, and their gradients.

    Args:
        segment: names, shapes and offsets.
        params: full; each object becomes this rank's piece, except DTensors, which are replaced
            by plain parameters.
        comms: the unit's process groups.
        options: of the unit.
        device: of full parameters.
        on_grad: called with a weak reference to the segment, and number and tensor of a leaf that
            has a gradient.

    Attributes:
        params: the optimizer's parameters, views of the shard.
        pointers: the addresses of these views.
        leaves: the full parameters that the module computes with, in layout order.
        pieces: the piece of each parameter.
        unit: a weak reference to its unit.
        aliased: whether the full buffer is the shard, so that nothing is gathered or freed.
        nodes: graph nodes that accumulate the gradients of the leaves; none of a frozen segment.
        grad_dtype: of the reduction.
        used: which leaves had a gradient on this rank in the sums since `.grad` was last set.
        arriving: this rank's gradients of the running backward, `full_grad`.
        arrived: which leaves have a gradient there.
        kept: this rank's sum, `(shard,)`, if it waits for the reduction over replicas.
    """

    used: list[bool]
    arriving: Tensor | None
    arrived: list[bool]
    kept: Tensor | None
    _reduced: Tensor | None
    _borrowed: Tensor | None
    _copy_out: SideWork | None

    def __init__(
        self,
        segment: Segment,
        params: Sequence[nn.Parameter],
        *,
        comms: CommGroups,
        options: UnitOptions,
        device: torch.device,
        on_grad: LeafHook,
    ) -> None:
        self.segment = segment
        self.comms = comms
        self.options = options
        self.device = device
        world_size = comms.gather.world_size
        self.plan = plan_shard(segment.layout, world_size=world_size, boundary=options.boundary)
        common = PieceSegment(self.plan, comms.gather, comms.replicate, device)
        self.pieces = tuple(
            ParamPiece(
                index, common, place=place, spread=(comms.reduce, *spread_of(place, comms.log))
            )
            for index, place in enumerate(map(place_of_dtensor, params))
        )
        home = torch.device("cpu") if options.cpu_offload else device
        dtype, numel = segment.layout.dtype, self.plan.shard_numel
        self.shard = torch.zeros(numel, dtype=dtype, device=home, pin_memory=self.pins(home))
        specs, offsets = segment.layout.specs, segment.layout.offsets
        self._places = [
            (spec.shape, spec.stride, at) for spec, at in zip(specs, offsets, strict=True)
        ]
        self._gaps = (*segment.layout.gaps, (segment.layout.numel, self.plan.numel))
        self._skips = any(piece.skips for piece in self.pieces)
        self._on_grad = on_grad
        self.params = self._move_into_shard(params)
        self._mark_params()
        self.unit: Callable[[], Any] = lambda: None
        self._users: list[torch.Stream] = []  # streams that read the full buffer
        self._is_captured = False  # whether they do so in a graph
        self._copy: SideWork | None = None
        self._copied: tuple[Tensor, SideWork] | None = None
        self._home = HERE
        self.make_full()

    @torch.no_grad()
    def _move_into_shard(self, params: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Copy one parameter after another, so that only one is in memory twice."""
        self._make_views()
        moved = []
        for index, param in enumerate(params):
            self.load_full(index, param.detach())
            moved.append(as_plain(param, self._views[index]))
        return moved

    def _make_views(self) -> None:
        self._views = [piece.view(self.shard) for piece in self.pieces]
        self.pointers = list(map(Tensor.data_ptr, self._views))

    def _mark_params(self) -> None:
        for param, piece in zip(self.params, self.pieces, strict=True):
            be_piece(param, piece)

    def make_full(self) -> None:
        """Make buffer and leaves; earlier ones live as long as their users."""
        dtype = compute_dtype(self.options.precision, self.shard.dtype)
        alone = self.comms.gather.world_size == 1
        self.aliased = alone and dtype == self.shard.dtype and self.shard.device == self.device
        self.full = self.shard
        if not self.aliased:
            self.full = torch.empty(self.plan.numel, dtype=dtype, device=self.device)
        # `.data` gives each leaf a version counter: filling the buffer again before backward must
        # not look like a change of the weights that autograd saved.
        views = param_views(self.full, self.segment.layout)
        leaves = [
            nn.Parameter(self.placed(index, view.data), requires_grad=self.segment.trainable)
            for index, view in enumerate(views)
        ]
        self.leaves = tuple(leaves)
        trained = leaves if self.segment.trainable else []
        self.nodes = [get_gradient_edge(leaf).node for leaf in trained]
        for index, leaf in enumerate(trained):
            # Weak: the garbage collector does not see the reference that C++ holds to hooks. A
            # strong hook would keep the unit, its module and its process groups alive.
            leaf.register_post_accumulate_grad_hook(
                partial(self._on_grad, weakref.ref(self), index)
            )
        self.grad_dtype = reduction_dtype(self.options.precision, self.shard.dtype)
        self.forget_grads()
        if not self.aliased:
            self.free()

    def placed(self, index: int, local: Tensor) -> Tensor:
        """Return a parameter as the module has it; `local` is this rank's part."""
        place = self.pieces[index].place
        return local if place is None else place.over(local)

    def pins(self, home: torch.device) -> bool:
        """Whether memory there is page-locked, for copies to and from another device."""
        goes = home.type == "cpu" and self.device.type not in ("cpu", "meta")
        return goes and self.options.pin_memory

    def use(self) -> None:
        """Read the full buffer on the current stream, after it was gathered."""
        if self.device.type == "cpu":
            return
        here = torch.accelerator.current_stream(self.device)
        if here not in self._users:
            if self._users:
                here.wait_stream(self._users[0])  # that one has waited for the gather
            else:
                self._is_captured = is_capturing(self.device)
            self._users.append(here)

    def gather_into(
        self, full: Tensor, *, waits: bool = True, copy_waits: bool | None = None
    ) -> Pending:
        """Begin to fill `full` (world*shard,), of any dtype. Collective.

        On an accelerator all work is on side streams. The stream of gathers also owns the memory of
        the full buffer. Before it reuses the memory, it waits for the streams that have read it,
        see `free`. A shard in host memory is copied on another one, while earlier units are
        gathered.

        Args:
            full: the buffer; its storage is allocated if it is free.
            waits: whether the gather begins after the work that is queued on the current stream,
                which may change the shard.
            copy_waits: the same for the copy of a shard in host memory; default: `waits`.
        """
        if full.device.type == "cpu":
            return self._gather(full)
        with SideWork(full.device, "in", waits=waits) as work:
            self._copy = None if self.shard.device == full.device else work
            pending = self._gather(full, work, waits if copy_waits is None else copy_waits)
            if pending.work is None or pending.device is not None:
                pending.wait()  # the side stream waits
            else:
                pending.home = Home(work.stream)  # the host will wait, as with gloo
        return pending.then(work.wait)

    def _gather(self, full: Tensor, work: SideWork | None = None, waits: bool = True) -> Pending:
        memory = full.untyped_storage()
        if not memory.nbytes():
            memory.resize_(full.nbytes)
        comm, plan, part = self.comms.gather, self.plan, self.shard
        staged = full if plan.even else full.new_empty(plan.world_size * plan.shard_numel)
        if part.device != full.device and comm.world_size == 1 and part.dtype == full.dtype:
            part = full.copy_(part, non_blocking=True)
        else:
            if part.device != full.device:
                assert work is not None, "the full buffer is on an accelerator"
                self.drop_copied()
                with SideWork(full.device, "copy", waits=waits) as self._copy:
                    part = part.to(full.device, non_blocking=True)
                self._copy.wait()
                self._copied = part, work
            part = part.to(full.dtype)
        pending = comm.all_gather(staged, part)
        return pending if staged is full else pending.then(partial(self._unstage, full, staged))

    def drop_copied(self) -> None:
        """Free the copy of a shard from host memory, once the gather has read it.

        Units do so when their computation has been queued: the copy of the next unit is queued by
        then, and does not wait for this gather.
        """
        if self._copied is not None:
            with side_stream(self.device, "copy"):
                self._copied[1].wait()
            self._copied = None

    def synchronize(self) -> None:
        """Wait on the host for the last copy of the shard, so that the shard may be changed."""
        if self._copy is not None:
            self._copy.synchronize()

    def _unstage(self, full: Tensor, staged: Tensor) -> None:
        rows = staged.view(self.plan.world_size, self.plan.shard_numel)
        for row, (start, stop) in zip(rows, self.plan.ranges, strict=True):
            full[start:stop].copy_(row[: stop - start])

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
        if self._users:
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

    def take_moved(self) -> None:
        """Use the values of parameters that have other memory.

        In a new shard: code that swaps weights keeps the old memory, as in `old = param.data`.
        """
        for param, piece, view in zip(self.params, self.pieces, self._views, strict=True):
            if param.shape != view.shape:
                shape, param.data = tuple(param.shape), view
                raise ParameterError(
                    f"flat_param.fully_shard: the data of parameter {piece.label} was replaced by "
                    f"a tensor of shape {shape}, but this rank's piece has "
                    f"{tuple(view.shape)}. The piece is back. Load full values by "
                    "load_state_dict, or write them under whole_params(write_back=True)."
                )
        self.shard = torch.zeros_like(self.shard, pin_memory=self.shard.is_pinned())
        self._make_views()
        for param, view in zip(self.params, self._views, strict=True):
            view.copy_(param.detach())
            param.data = view
        if self.aliased:
            self.full = self.shard
            views = param_views(self.full, self.segment.layout)
            for leaf, view in zip(self.leaves, views, strict=True):
                getattr(leaf, "_local_tensor", leaf).data = view

    @torch.no_grad()
    def rebind(self, tensors: Sequence[Tensor]) -> None:
        """Use pieces of another dtype or device, after `.to()`."""
        dtype, home = tensors[0].dtype, tensors[0].device
        numel, pinned = self.plan.shard_numel, self.pins(home)
        remade = dtype != self.shard.dtype or home != self.shard.device or self.aliased
        self.shard = torch.zeros(numel, dtype=dtype, device=home, pin_memory=pinned)
        self.device = self.device if self.options.cpu_offload else self.shard.device
        self._make_views()
        for param, view, tensor in zip(self.params, self._views, tensors, strict=True):
            view.copy_(tensor)
            param.data = view
        if remade:
            self.make_full()
        self.pieces[0].segment.device = self.device
        self._mark_params()

    # Gradients.

    def take(self, index: int, pool: BufferPool) -> None:
        """Move one leaf's gradient into the flat gradient, or add it to an existing one."""
        leaf = self.leaves[index]
        grad, leaf.grad = leaf.grad, None
        if grad is None:
            return
        place = self.pieces[index].place
        local = grad.detach() if place is None else place.local_of_grad(grad)
        full = self.arriving if self.arriving is not None else self._flat_grad(pool)
        view = full.as_strided(*self._places[index])
        if self.arrived[index]:
            view.add_(local)
        else:
            view.copy_(local.to_dense() if local.is_sparse else local)
            self.arrived[index] = True

    def _flat_grad(self, pool: BufferPool) -> Tensor:
        """The buffer of this rank's gradients."""
        if self.arriving is None:
            numel, device = self.full.numel(), self.device
            self._home = HERE if device.type == "cpu" else home_of(device)
            if self.comms.reduce.world_size == 1:  # it becomes `reduced`
                whole = torch.empty(numel, dtype=self.grad_dtype, device=device)
            else:
                whole = self._borrowed = pool.acquire(numel, dtype=self.grad_dtype, device=device)
            for start, stop in self._gaps:
                if start < stop:
                    whole[start:stop].zero_()
            self.arrived = [False] * len(self.leaves)
            self.arriving = whole[:numel]
        return self.arriving

    def start_reduce(self, pool: BufferPool) -> Pending:
        """Begin to reduce the gradients of all ranks into this rank's shard. Collective."""
        full, comm = self._flat_grad(pool), self.comms.reduce
        self.used = [now or before for now, before in zip(self.arrived, self.used, strict=True)]
        with self._home:
            for place, has_arrived in zip(self._places, self.arrived, strict=True):
                if not has_arrived:
                    full.as_strided(*place).zero_()
            if full.dtype == torch.float16:
                full.div_(self.comms.world_size)  # a sum over many ranks may exceed its range
            if comm.world_size == 1:
                self._reduced, pending = full, Pending(comm, "reduce_scatter")
            else:
                shape = (self.shard.numel(),)
                self._reduced = torch.empty(shape, dtype=self.grad_dtype, device=self.device)
                staged = full if self.plan.even else self._staged(full)
                pending = comm.reduce_scatter(self._reduced, staged, pool=pool)
        pending.home = self._home
        return pending

    def _staged(self, full: Tensor) -> Tensor:
        plan = self.plan
        staged = full.new_zeros(plan.world_size, plan.shard_numel)
        for row, (start, stop) in zip(staged, plan.ranges, strict=True):
            row[: stop - start].copy_(full[start:stop])
        return staged.view(-1)

    def start_sum(self, unit: Any, pool: BufferPool) -> Pending | None:
        """Begin to reduce this rank's sum over replicas, once the ranks' shards are. Collective.

        Args:
            unit: the segment's unit, which says how gradients are reduced.
            pool: takes back the buffer of this rank's gradients.

        Returns:
            The reduction, after which `finish_sum` is called; None if the sum is finished or kept.
        """
        buffer, self._borrowed = self._borrowed, None  # first, so that it is released once
        self.arriving = None
        if buffer is not None:
            pool.release(buffer)
        comm, reduced = self.comms.replicate, self._reduced
        assert reduced is not None, "start_reduce makes it"
        with self._home:
            if self.kept is not None:
                reduced.add_(self.kept)
                self.kept = None
            if comm.group is None:
                self.finish_sum(unit)
                return None
            if not unit.sums_copies:
                self.kept, self._reduced = reduced, None
                return None
            pending = comm.all_reduce(reduced)
        pending.home = self._home
        return pending

    def finish_sum(self, unit: Any) -> None:
        """Divide the sum, and give it the dtype and the device of the shard."""
        reduced, shard, ranks = self._reduced, self.shard, self.comms.world_size
        assert reduced is not None, "start_reduce makes it"
        factor = float(ranks if unit.divide_factor is None else unit.divide_factor)
        if reduced.dtype == torch.float16:
            factor /= ranks
        with self._home:
            if unit.on_sum is not None:
                unit.on_sum(reduced)
            if factor != 1:
                reduced.div_(factor)
            if reduced.device != shard.device:
                self._reduced = torch.empty_like(shard, pin_memory=self.pins(shard.device))
                with SideWork(reduced.device, "out") as copy:
                    reduced.record_stream(copy.stream)
                    self._reduced.copy_(reduced.to(shard.dtype), non_blocking=True)
                self._copy_out = copy
            elif reduced.dtype != shard.dtype:
                self._reduced = reduced.to(shard.dtype)

    def assign_grads(self, used_anywhere: Sequence[bool]) -> None:
        """Set `.grad` of parameters that some rank has used, outside autograd; call their hooks."""
        reduced, self._reduced = self._reduced, None
        self.used = [False] * len(self.used)
        if reduced is None:
            return
        copy, self._copy_out = self._copy_out, None
        if copy is not None:
            copy.synchronize()
        used = [index for index, flag in enumerate(used_anywhere) if flag]
        if self._skips:
            for piece in (self.pieces[index] for index in used):
                piece.is_stepped |= piece.skips
            used = [index for index in used if not self.pieces[index].skips]
        hooks: list[tuple[nn.Parameter, list[Callable[[Tensor], None]]]] = []
        with self._home, without_torch_function():
            before = [self.params[index].grad for index in used]
            adds = any(grad is not None for grad in before)
            for index, old in zip(used, before, strict=True):
                param, piece = self.params[index], self.pieces[index]
                if found := post_accumulate_grad_hooks(param):
                    hooks.append((param, list(found.values())))
                # `.data`: each gradient has its own version counter.
                grad = reduced.data.as_strided(piece.piece_shape, piece.piece_stride, piece.offset)
                if old is not None:
                    old.add_(grad)
                else:  # a view would keep the memory of gradients that are added
                    own = (grad.clone() if adds else grad).as_subclass(Piece)
                    setattr(own, PIECE, piece)
                    param.grad = own
        with self._home:
            for param, functions in hooks:
                for tell in functions:
                    tell(param)

    def forget_grads(self) -> None:
        """Drop the gradients of a stopped backward.

        A collective may still read the buffer, so it does not return to the pool.
        """
        self.used = [False] * len(self.nodes)
        self.arriving = self.kept = self._reduced = self._borrowed = self._copy_out = None
        self.arrived = []
