"""One segment's gradients on this rank, from leaves to the optimizer's parameters.

    full_grad  (world*shard,)  reduce dtype; this rank's gradients, from the first one of a backward
                               until they are reduced; borrowed from a pool. One rank reduces
                               nothing, so there it becomes `reduced`.
    reduced    (shard,)        reduce dtype, then that of the parameters; new for each backward.
                               `.grad` is a view of it, or has it added.

- A frozen segment has neither. A parameter that no rank used keeps its previous `.grad`.
- Only `.grad` refers to the memory of gradients. So they are freed with `.grad`, and users may keep
  them.
- autograd only sees the leaves, so post-accumulate hooks of the optimizer's parameters are called
  once `.grad` is set.
- All work runs on the stream on which the leaves' gradients arrive, which autograd chooses. Buffers
  are allocated there, so no other stream waits for them.
- Until replicas are reduced, this rank's sum, `(shard,)`, is kept and added to the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..._errors import ParameterError
from ..._torch_compat import (
    assign_grad,
    post_accumulate_grad_hooks,
    with_grad_hook,
    without_torch_function,
)
from ...buffers._grads import GradBuffer
from ...buffers._views import zero_gaps_
from ...comm._buffer_pool import BufferPool
from ...comm._comm import Pending
from ...comm._streams import SideWork, at_home, home_stream, record_use
from ...layout._options import reduction_dtype
from ..tensor._piece_tensors import as_piece
from ._sharded_params import ShardedParams


@dataclass(frozen=True)
class Reduction:
    """How the gradients of a unit are reduced over ranks.

    Attributes:
        factor: divisor of sums; None: the number of ranks.
        sums_copies: whether replicas are reduced.
        on_sum: called with this rank's part of each sum before the division.
    """

    factor: float | None = None
    sums_copies: bool = True
    on_sum: Callable[[Tensor], object] | None = None


class ShardedGrads:
    """The gradients of one trainable segment.

    Attributes:
        leaves: of the segment, at construction.
        dtype: of the reduction.
        used: which leaves had a gradient on this rank in the sums since `.grad` was last set.
        kept: this rank's sum, `(shard,)`, if it waits for the reduction over replicas.
    """

    def __init__(self, owner: ShardedParams) -> None:
        self.owner = owner
        self.leaves = owner.leaves
        self.comms = owner.comms
        self.dtype = reduction_dtype(owner.options.precision, owner.shard.dtype)
        self.used = [False] * len(owner.leaves)
        self._borrowed: Tensor | None = None
        self.held: GradBuffer | None = None
        self._reduced: Tensor | None = None
        self.kept: Tensor | None = None
        self._home: torch.Stream | None = None
        self._copy: SideWork | None = None

    def take(self, index: int, pool: BufferPool) -> None:
        """Move one leaf's gradient into the flat gradient, or add it to an existing one."""
        leaf = self.leaves[index]
        grad, leaf.grad = leaf.grad, None
        if grad is not None:
            place = self.owner.pieces[index].place
            local = grad.detach() if place is None else place.local_of_grad(grad)
            (self.held or self.need_held(pool)).take(index, local)

    def need_held(self, pool: BufferPool) -> GradBuffer:
        """Return the buffer of this rank's gradients."""
        if self.held is None:
            plan, device = self.owner.plan, self.owner.device
            self._home = home_stream(device)
            if self.comms.reduce.world_size == 1:  # it becomes `reduced`
                whole = torch.empty(plan.numel, dtype=self.dtype, device=device)
            else:
                whole = self._borrowed = pool.acquire(plan.numel, dtype=self.dtype, device=device)
            layout = self.owner.segment.layout
            flat = zero_gaps_(whole[: plan.numel], layout)
            self.held = GradBuffer(flat, layout, [False] * len(self.leaves))
        return self.held

    def _release(self, pool: BufferPool) -> None:
        buffer, self._borrowed = self._borrowed, None  # first, so that it is released once
        self.held = None
        if buffer is not None:
            pool.release(buffer)

    def start_reduce(
        self, how: Reduction, pool: BufferPool
    ) -> tuple[Pending, Callable[[], Pending]]:
        """Begin to reduce the gradients of all ranks into this rank's shard. Collective.

        Returns:
            The reduction, and a function to call after it, which begins the one over replicas.
        """
        held, ranks = self.need_held(pool), self.comms.world_size
        self.used = [now or before for now, before in zip(held.arrived, self.used, strict=True)]
        factor = float(ranks if how.factor is None else how.factor)
        with at_home(self._home):
            held.zero_rest()
            full = held.flat
            if full.dtype == torch.float16:
                full.div_(ranks)  # a sum over many ranks may exceed float16's range
                factor /= ranks
            comm, numel = self.comms.reduce, self.owner.shard.numel()
            if comm.world_size == 1:
                self._reduced, pending = full, Pending(comm, "reduce_scatter")
            else:
                self._reduced = torch.empty(numel, dtype=self.dtype, device=self.owner.device)
                sent = _real(self._staged(full))
                pending = comm.reduce_scatter(_real(self._reduced), sent, pool=pool)
        pending.home = self._home
        pending.then(partial(self._release, pool))
        return pending, partial(self._start_sum, how, factor)

    def _staged(self, full: Tensor) -> Tensor:
        plan = self.owner.plan
        if plan.even:
            return full
        staged = full.new_zeros(plan.world_size, plan.shard_numel)
        for row, (start, stop) in zip(staged, plan.ranges, strict=True):
            row[: stop - start].copy_(full[start:stop])
        return staged.view(-1)

    def _start_sum(self, how: Reduction, factor: float) -> Pending:
        """Begin to reduce this rank's sum over replicas. Collective."""
        comm, reduced = self.comms.replicate, self._reduced
        if reduced is None:
            return Pending(comm, "all_reduce")
        with at_home(self._home):
            if self.kept is not None:
                reduced.add_(self.kept)
                self.kept = None
            if not how.sums_copies and comm.group is not None:
                self.kept, self._reduced = reduced, None
                return Pending(comm, "all_reduce")
            pending = comm.all_reduce(_real(reduced))
        pending.home = self._home
        return pending.then(partial(self._after_sum, how, factor))

    def _after_sum(self, how: Reduction, factor: float) -> None:
        reduced, shard = self._reduced, self.owner.shard
        if reduced is None:
            return
        if how.on_sum is not None:
            how.on_sum(reduced)
        if factor != 1:
            reduced.div_(factor)
        if reduced.device != shard.device:
            self._reduced = self._to_host(reduced)
        elif reduced.dtype != shard.dtype:
            self._reduced = reduced.to(shard.dtype)

    def _to_host(self, reduced: Tensor) -> Tensor:
        shard = self.owner.shard
        moved = torch.empty_like(shard, pin_memory=self.owner.pins(shard.device))
        with SideWork(reduced.device, "out") as copy:
            record_use(self._home, reduced)
            moved.copy_(reduced.to(shard.dtype), non_blocking=True)
        self._copy = copy
        return moved

    @torch.no_grad()
    def assign_grads(self, used_anywhere: Sequence[bool]) -> None:
        """Set `.grad` of parameters that some rank has used, and call their hooks."""
        reduced, self._reduced = self._reduced, None
        self.used = [False] * len(self.used)
        if reduced is None:
            return
        copy, self._copy = self._copy, None
        if copy is not None:
            copy.synchronize()
        params = self.owner.held.params
        with at_home(self._home):
            with without_torch_function():
                taken = [index for index, used in enumerate(used_anywhere) if used]
                # A view would keep the memory of all gradients, though others are added.
                is_first = all(params[index].grad is None for index in taken)
            for index in taken:
                piece = self.owner.pieces[index]
                if piece.skips:
                    piece.is_stepped = piece.has_grad_elsewhere = True
                else:
                    self._assign(index, params[index], reduced, is_first=is_first)

    def _assign(self, index: int, param: Tensor, reduced: Tensor, *, is_first: bool) -> None:
        piece = self.owner.pieces[index]
        with without_torch_function():
            told = post_accumulate_grad_hooks(param)
            grad = piece.view(reduced.data)  # each with a separate version counter
            if param.grad is not None:
                param.grad.add_(grad)
            else:
                assign_grad(param, as_piece(grad if is_first else grad.clone(), piece))
        for tell in told:
            tell(param)

    def clear(self, set_to_none: bool) -> None:
        """Clear `.grad` of the optimizer's parameters."""
        with without_torch_function():
            for param in self.owner.held.params:
                if set_to_none:
                    param.grad = None
                elif param.grad is not None:
                    param.grad.zero_()

    def check_hooks(self) -> None:
        """Refuse a hook of `register_hook`, which would get a piece."""
        for index in with_grad_hook(self.owner.held.params):
            raise ParameterError(
                f"flat_param.fully_shard: parameter {self.owner.pieces[index].label} has a hook "
                "of register_hook, but autograd only sees unsharded parameters, so it would never "
                "be called. Use register_post_accumulate_grad_hook, which gets this rank's piece."
            )

    def forget(self) -> None:
        """Drop the gradients of a stopped backward.

        A collective may still read the buffer, so it does not return to the pool.
        """
        self.used = [False] * len(self.used)
        self.kept = self._reduced = self._borrowed = self.held = self._copy = None


def _real(tensor: Tensor) -> Tensor:
    """Return complex numbers as pairs of real ones: sums are equal, and backends support them."""
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor
