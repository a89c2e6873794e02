"""The class that `fully_shard` adds to a module.

`fully_shard` changes a module's class to a subclass of it and of `ShardedModule`. That adds a
`__call__` around the module's own, so parameters are full from before the first forward hook of the
module until after the last.

It is a subclass of FSDP2's `FSDPModule`, too, by which torch's pipelines, accelerate, Lightning and
TRL recognise sharded modules. `ShardedModule` has the methods that they call; other methods of
FSDP2 raise.
"""

from __future__ import annotations

import functools
import inspect
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any, ClassVar, NoReturn
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .._errors import StateError
from .._torch_compat import (
    fsdp_module_class,
    pass_over_frames,
    splits_backward,
    without_torch_function,
)
from ..buffers._dtensors import local_of, place_of_dtensor
from ..comm._comm import CommCount
from ..comm._groups import spread_of
from .tensor._callers import PIPELINES
from .tensor._param_piece import PIECE, JoinedPieces
from .tensor._reductions import Part, PieceNorm, norms_of_pieces
from .unit._by_hand import (
    UnshardHandle,
    begin_unshard,
    full_params,
    reshard,
    units_at_rest,
    units_below,
)
from .unit._unit import Unit

_classes: WeakValueDictionary[type, type] = WeakValueDictionary()
_DOUBLE = (torch.float64, torch.complex128)


def sharded_class(cls: type[nn.Module]) -> Any:
    """The sharded subclass of a class. Modules of one class share it and its compiled code."""
    made = _classes.get(cls)
    if made is None:
        pass_over_frames(ShardedModule.__call__, _run)
        bases = (ShardedModule, cls, fsdp_module_class())
        # transformers writes the class's name without this prefix into a model's config.
        made = _classes[cls] = type(f"FSDP{cls.__name__}", bases, {})
    return made


def _run(
    module: Any, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call `run` as a forward of the module's unit. Collective."""
    unit = module._flat_param
    schedule = module._flat_param_schedule
    forward = schedule.current.forward
    depth = 0 if forward is None else len(forward.units)
    try:
        args, kwargs = schedule.pre_forward(schedule, unit, args, kwargs)
        return schedule.post_forward(schedule, unit, module, run(*args, **kwargs))
    except BaseException:
        schedule.stop(depth)
        raise


class ReductionHandle:
    """What `ShardedModule.finalize_backward` returns with `async_op`; its work is done."""

    def wait(self) -> None:
        """Return at once."""


class ForwardMethodCall:
    """A call of a method that torch's `register_fsdp_forward_method` has registered.

    torch calls the two methods around it, and refers to this object until it is over, also by an
    error. Other methods of FSDP2's modules read attributes, which are refused.
    """

    __slots__ = ("_depth", "_schedule")

    def __init__(self) -> None:
        self._schedule: Any = None
        self._depth = 0

    def _pre_forward(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._schedule = schedule = module._flat_param_schedule
        self._depth = schedule.depth
        found: tuple[tuple[Any, ...], dict[str, Any]]
        found = schedule.pre_forward(schedule, module._flat_param, args, kwargs)
        return found

    def _post_forward(self, module: Any, args: tuple[Any, ...], output: Any) -> Any:
        schedule = self._schedule
        output = schedule.post_forward(schedule, module._flat_param, module, output)
        self._schedule = None
        return output

    def __getattr__(self, name: str) -> NoReturn:
        raise StateError(
            f"flat_param.fully_shard: a method of FSDP2's modules reads {name}, which sharded "
            "modules do not have. See ShardedModule for their methods, or use "
            "torch.distributed.fsdp.fully_shard."
        )

    def __del__(self) -> None:
        if self._schedule is not None:
            self._schedule.stop(self._depth)


class ShardedModule(nn.Module):
    """What `fully_shard` adds to a module's class. Do not create it by hand.

    Methods marked "Collective" must be called on every rank; no other communicates. Every rank must
    make the same settings, with `recurse` also for the units inside.
    """

    _flat_param: Unit
    # Attributes of FSDP2's modules: transformers' generate() keeps ranks in step, dynamo compiles.
    _is_fsdp_managed_module: ClassVar[bool] = True
    _fsdp_use_orig_params: ClassVar[bool] = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module with whole parameters. Collective."""
        return _run(self, super().__call__, args, kwargs)

    def register_forward_method(self, name: str) -> None:
        """Make a method run like a call of the module, with full parameters. Collective.

        For methods that compute without calling the module, such as `encode` of an autoencoder.
        torch's `register_fsdp_forward_method` does the same. Registering one twice does nothing
        more.

        Args:
            name: of a method of the module's class.

        Raises:
            StateError: the class has no such method, or it is the module's own call.
        """
        method = inspect.getattr_static(type(self), name, None)
        if not inspect.isfunction(method) or name in vars(nn.Module):
            raise StateError(
                f"flat_param.register_forward_method: {name!r} is not a method that "
                f"{type(self).__name__} defines, but only such methods can run with whole "
                "parameters. Pass the name of one; forward needs no registration."
            )
        module_ref = weakref.ref(self)

        @functools.wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            module = module_ref()
            return _run(module, functools.partial(method, module), args, kwargs)

        pass_over_frames(run)
        object.__setattr__(self, name, run)

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this unit's own parameters now, and show them. Collective.

        Units inside are left alone. Parameters stay full until `reshard()`, or until the unit's
        next forward or backward has ended; that forward does not gather then. Computations with
        them lead backward into the unit. As with FSDP2, parameters that are written to or
        re-assigned meanwhile are lost when they are resharded: change `parameters()` before, or
        under `whole_params(write_back=True)`. `parameters()` returns the full tensors meanwhile, so
        make optimizers and read gradients after `reshard()`. In the unit's own forward or backward
        they are full already, and nothing happens.

        Args:
            async_op: only begin; the next forward waits, or the handle.

        Returns:
            With `async_op`, a handle whose `wait()` shows the parameters; None otherwise.
        """
        is_async = checked_flag(async_op, "unshard")
        pipeline = PIPELINES.frame()
        if pipeline and splits_backward(pipeline.f_locals.get("self")):
            raise StateError(
                "flat_param.fully_shard: a zero-bubble pipeline computes the gradients of "
                "parameters apart from those of inputs, but sharded gradients are reduced in whole "
                "backwards. Use GPipe, 1F1B or Interleaved1F1B."
            )
        handle = begin_unshard(self._flat_param)
        if not is_async:
            handle.wait()
        return handle if is_async else None

    def reshard(self) -> None:
        """Free this unit's own full parameters until they are needed.

        Tensors that were taken from the module while it was unsharded lose their memory. A later
        backward gathers them again: every rank must call this, or none.

        Raises:
            StateError: called in the unit's own forward, or in a backward that still needs it.
        """
        reshard(self._flat_param)

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Set whether backward passes reduce gradients; `no_sync` does this temporarily.

        The units of a tree reduce together: a backward raises if some reduce and others do not.
        """
        reduces = checked_flag(requires_gradient_sync, "set_requires_gradient_sync")
        for unit in self._units(recurse):
            unit.syncs = reduces

    def finalize_backward(self, async_op: bool = False) -> ReductionHandle | None:
        """Reduce the gradients that backward passes without reductions have left. Collective.

        Does nothing while `set_requires_gradient_sync(False)` is set, or inside `no_sync`.

        Returns:
            With `async_op`, a handle whose `wait()` returns at once; None otherwise.
        """
        is_async = checked_flag(async_op, "finalize_backward")
        self._flat_param.schedule.reduce_accumulated()
        return ReductionHandle() if is_async else None

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Accept what pipelines set: here, every backward finishes what it begins."""
        checked_flag(enabled, "set_manual_backward_finalization")

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Accept what pipelines set: here, every backward waits for its own reductions."""
        checked_flag(is_last_backward, "set_is_last_backward")

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Set whether this unit's parameters are gathered for backward.

        Pass False only if backward reads none of them, as in a unit of an embedding: reading freed
        parameters ends the process, as with FSDP2.
        """
        unshards = checked_flag(unshard_in_backward, "set_unshard_in_backward")
        self._flat_param.unshards_in_backward = unshards

    def _get_fsdp_state(self) -> ForwardMethodCall:
        return ForwardMethodCall()

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Set whether full parameters are freed between forward and backward.

        True is ZeRO-3, False is ZeRO-2; the outermost unit's stay in any case, as its backward
        begins at once. A forward without gradients always frees them.

        Raises:
            StateError: it is a number of ranks; use a mesh with two axes.
        """
        frees = checked_flag(reshard_after_forward, "set_reshard_after_forward")
        for unit in self._units(recurse):
            unit.frees_after_forward = frees

    def set_reshard_after_backward(
        self, reshard_after_backward: bool | None, *, recurse: bool = True
    ) -> None:
        """Set whether full parameters are freed after backward; None restores the default.

        By default they are, except those that stay after forward, inside `no_sync`, and all after a
        backward with `create_graph=True`, until the one through its graph is over. If they stay,
        the next forward gathers nothing, unless a parameter has changed.
        """
        frees = reshard_after_backward
        if frees is not None:
            frees = checked_flag(frees, "set_reshard_after_backward")
        for unit in self._units(recurse):
            unit.frees_after_backward = frees

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Set whether backward passes reduce gradients over the first axis of a mesh with two.

        If False, gradients are reduced over the ranks that share the parameters, this rank's part
        is kept, and no `.grad` is set. The first backward that also reduces over replicas then sets
        `.grad` to the sum.
        """
        sums = checked_flag(requires_all_reduce, "set_requires_all_reduce")
        for unit in self._units(recurse):
            unit.sums_copies = sums

    def set_gradient_divide_factor(self, factor: float | None) -> None:
        """Set the divisor of this unit's own gradient sums; units inside are left alone.

        The default is the number of ranks: gradients are means.

        Args:
            factor: above 0; 1 gives sums; None restores the mean.

        Raises:
            StateError: it is no number above 0.
        """
        if factor is not None and not (isinstance(factor, Real) and factor > 0):
            raise StateError(
                f"flat_param.set_gradient_divide_factor: factor is {factor!r}, but sums are "
                "divided by it. Pass a number above 0, or None for the number of ranks."
            )
        self._flat_param.divide_factor = factor

    def set_all_reduce_hook(self, hook: Callable[[Tensor], object] | None) -> None:
        """Set a function that changes this unit's own sums in place before the division.

        It is called on every rank in the same order, so it may communicate. Units inside are left
        alone.

        Args:
            hook: called with this rank's part of a sum, `(shard,)`, in the reduce dtype, once for
                each dtype of the unit's parameters; None removes it.
        """
        self._flat_param.on_sum = hook

    def set_modules_to_forward_prefetch(self, modules: list[ShardedModule]) -> None:
        """Set which units are gathered when this one's forward begins to compute.

        By default it is the unit that came next in the last pass. Units that have begun already are
        skipped, and units that are listed but not used are freed when the outermost forward ends.

        Args:
            modules: sharded modules of the same tree, in the order in which they are gathered; an
                empty list restores the default.

        Raises:
            StateError: it is not a list of such modules.
        """
        self._flat_param.forward_prefetch = self._listed(modules, "forward")

    def set_modules_to_backward_prefetch(self, modules: list[ShardedModule]) -> None:
        """Set which units are gathered when this one's backward begins to compute.

        Units that backward has already gathered, keeps full or does not reach are skipped.

        Args:
            modules: as in `set_modules_to_forward_prefetch`.

        Raises:
            StateError: it is not a list of such modules.
        """
        self._flat_param.backward_prefetch = self._listed(modules, "backward")

    def _listed(self, modules: Any, kind: str) -> tuple[Unit, ...]:
        own = self._flat_param
        is_list = isinstance(modules, Iterable) and not isinstance(modules, ShardedModule)
        units = [getattr(each, "_flat_param", own) for each in modules] if is_list else [own]
        if any(each is own or each.schedule is not own.schedule for each in units):
            raise StateError(
                f"flat_param.set_modules_to_{kind}_prefetch: modules must be a list of other "
                "sharded modules below one outermost unit. Call fully_shard on each, and on a "
                "module around them."
            )
        return tuple(units)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on each rank; the first backward after it reduces all of them.

        With `reshard_after_forward=False` nothing is communicated inside; otherwise parameters are
        gathered as usual.
        """
        schedule = self._flat_param.schedule
        before, schedule.sync = schedule.sync, False
        try:
            yield
        finally:
            schedule.sync = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, also those accumulated inside `no_sync`.

        An optimizer's `zero_grad()` clears only `.grad`.
        """
        for unit in units_below(self):
            unit.schedule.drop_accumulated()
        super().zero_grad(set_to_none)
        parts = [part for unit in self._units() if unit.is_shown for part in unit.trained]
        for param in (param for part in parts for param in part.params):
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.zero_()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their norm over all ranks is at most `max_norm`. Collective.

        If the gradients of `ignored_params` differ between ranks, the largest of their norms
        counts.

        Returns:
            The norm before clipping, the same on every rank.

        Raises:
            StateError: `max_norm` is not 0 or more, or `norm_type` is 0 or no number.
        """
        max_norm, norm_type = _checked_norms(max_norm, norm_type)
        params = {id(each): each for each in self._all_params()}.values()
        with without_torch_function():
            norm = _norm_of_grads(params, self._flat_param, norm_type)
            scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
            for grad in [local_of(each.grad) for each in params if each.grad is not None]:
                grad.mul_(scale.to(grad.device, grad.real.dtype))
        return norm

    @contextmanager
    def whole_params(self, *, write_back: bool = False) -> Iterator[None]:
        """Put full parameters, in their own dtype, into the module temporarily. Collective.

        They are copies: meanwhile the module cannot run, load, move or be saved, except that its
        `state_dict()` returns them.

        Args:
            write_back: keep values that were written to them; every rank must write the same.

        Raises:
            StateError: called in forward or backward, or inside another one.
            ParameterError: one was replaced, and is to be written back.
        """
        with full_params(self, write_back=write_back):
            yield

    def comm_counts(self) -> dict[str, CommCount]:
        """Return this rank's communication since the last call, by kind of collective."""
        log = self._flat_param.schedule.log
        counts = dict(log.counts)
        log.reset()
        return counts

    def _units(self, recurse: bool = True) -> list[Unit]:
        """Return this module's units and those inside."""
        return list(units_below(self)) if recurse else [self._flat_param]

    def _all_params(self) -> Iterator[nn.Parameter]:
        """Return the pieces of `parameters()`, also if `unshard` shows the leaves."""
        yield from self.parameters()
        for unit in self._units():
            for part in unit.parts:
                yield from part.params

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ShardedModule:
        units_at_rest(self, "to")
        super()._apply(fn, recurse)
        for unit in self._units(recurse):
            unit.rebind()
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise StateError(
            f"flat_param.fully_shard: {type(self).__name__} cannot be copied or pickled, since it "
            "holds process groups. Copy the plain module before sharding, or use its state_dict()."
        )


def _checked_norms(max_norm: float, norm_type: float) -> tuple[float, float]:
    """Convert both to numbers; texts such as "inf" are accepted."""
    try:
        most, order = float(max_norm), float(norm_type)
    except (TypeError, ValueError):
        most = order = math.nan
    if not most >= 0 or math.isnan(order) or not order:
        raise StateError(
            f"flat_param.clip_grad_norm_: max_norm is {max_norm!r} and norm_type {norm_type!r}. "
            "Pass a max_norm of at least 0, and a norm_type such as 2.0 or 'inf'. The module's own "
            "method takes no parameters: it clips all of them."
        )
    return most, order


def _norm_of_grads(params: Iterable[Tensor], unit: Unit, order: float) -> Tensor:
    """The norm of gradients over ranks, `()`; float64 if a gradient is. Collective.

    Each rank has separate gradients of ignored parameters, of which the largest norm counts. Pieces
    are read as plain tensors: the caller has switched their functions off.
    """
    ignored = set(map(id, unit.ignored))
    shared: list[tuple[Part | None, Tensor]] = []
    beside: list[tuple[Part | None, Tensor]] = []
    for param in params:
        part: Part | None = getattr(param, PIECE, None)
        grad = param.grad
        takes_part = part is not None or id(param) in ignored  # though this rank has no gradient
        if part is None and (place := place_of_dtensor(param)) is not None:
            part = JoinedPieces(spread_of(place, unit.comms.log), param.device)
            grad = None if grad is None else place.local_of_grad(grad)
        if takes_part or grad is not None:
            local = torch.zeros(0, device=param.device) if grad is None else grad
            local = local.detach().as_subclass(Tensor)
            (beside if id(param) in ignored else shared).append((part, local))
    norms = [_joint_norm(each, order) for each in (shared, beside) if each]
    for comm in (unit.comms.reduce, unit.comms.replicate) if beside else ():
        comm.all_reduce(norms[-1], dist.ReduceOp.MAX, of_unit=False).wait()
    if not norms:
        return torch.zeros(())
    total = torch.stack([norm.to(norms[0].device) for norm in norms])
    is_double = any(each.dtype in _DOUBLE for _, each in (*shared, *beside))
    found = torch.linalg.vector_norm(total, order)
    return found.to(torch.float64 if is_double else torch.float32)


def _joint_norm(grads: Sequence[tuple[Part | None, Tensor]], order: float) -> Tensor:
    """The norm of gradients over the ranks that have parts of them, in float64. Collective."""
    parts, tensors = zip(*grads, strict=True)
    device = tensors[0].device
    wide = torch.float32 if device.type == "mps" else torch.float64
    local = norms_of_pieces(tensors, [None] * len(tensors), order)
    stacked = torch.stack([norm.to(device, wide) for norm in local])
    return PieceNorm.of(stacked, [(part, 1) for part in parts], order).combined()


def checked_flag(value: object, function: str) -> bool:
    """The value, if it is True or False."""
    if not isinstance(value, bool):
        is_count = isinstance(value, int) and "reshard_after_forward" in function
        hint = ", or shard over fewer ranks with a 2-D mesh (replicate, shard)" if is_count else ""
        raise StateError(f"flat_param.{function}: got {value!r}. Pass True or False{hint}.")
    return value
