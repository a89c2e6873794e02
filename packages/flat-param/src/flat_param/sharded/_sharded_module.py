"""What a sharded module has beyond its own class.

`fully_shard` swaps a module's class for a subclass of it and of `ShardedModule`. That adds a
`__call__` around the module's own, so parameters are whole before the first forward hook of the
module runs and until after the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn

from .._errors import StateError
from ..comm._clip import clip_
from ..comm._comm import CommCount
from . import _switches
from ._by_hand import UnshardHandle, begin_unshard, reshard, units_at_rest, units_below
from ._full_params import full_params, full_state, load_full_state
from ._sharded_grads import norm_of
from ._unit import Unit
from ._unit_call import run_unit, with_method


class ShardedModule(nn.Module):
    """What `fully_shard` adds to a module's class. Not to be made by hand.

    Methods that communicate must be called on every rank.
    """

    _flat_param: Unit
    _flat_param_class: type[nn.Module]
    _flat_param_methods: ClassVar[dict[str, Callable[..., Any]]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module with whole parameters. Collective."""
        return run_unit(self._flat_param, super().__call__, args, kwargs)

    def register_forward_method(self, name: str) -> None:
        """Let a method be called as the module itself is: with whole parameters. Collective.

        For methods that compute without calling the module, as `encode` of an autoencoder. What
        FSDP2 has as `register_fsdp_forward_method`. Registering one twice does nothing more.

        Args:
            name: of a method of the module's class.

        Raises:
            StateError: the class has no such method, or it is the module's own call.
        """
        self.__class__ = with_method(type(self), name)

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this unit's own parameters now, and show them. Collective.

        Units inside are left alone. Parameters stay whole until `reshard()`, or until the unit's
        next forward or backward is over; that forward gathers nothing then. What is computed with
        them leads backward into the unit. What is written to them stays, as if the one process had
        written it: every rank must write the same. `parameters()` has the whole tensors meanwhile,
        so make optimizers and read gradients after `reshard()`. In the unit's own forward or
        backward they are whole already, and nothing happens.

        Args:
            async_op: only begin; the next forward waits, or the handle.

        Returns:
            With `async_op`, a handle whose `wait()` shows the parameters; None otherwise.
        """
        handle = begin_unshard(self._flat_param)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free this unit's own whole parameters until they are needed. Not a collective.

        Tensors that were taken from the module while it was unsharded stay as they are. Where a
        backward is to come, it gathers them again: every rank must call this, or none.

        Raises:
            StateError: called in the unit's own forward, or in a backward that is not done with it.
        """
        reshard(self._flat_param)

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Say whether backward passes sum gradients, until it is said again. Not a collective.

        What `no_sync` does for a while. Every rank must say the same.

        Args:
            requires_gradient_sync: whether to sum.
            recurse: must be True: the units of a tree sum together.

        Raises:
            StateError: `recurse` is False, or the module is not the outermost unit.
        """
        _switches.sum_gradients(self._flat_param, requires_gradient_sync, recurse=recurse)

    def set_reshard_after_forward(
        self, reshard_after_forward: bool | int, recurse: bool = True
    ) -> None:
        """Say whether whole parameters are freed between forward and backward.

        True is what FULL_SHARD does, False what SHARD_GRAD_OP does; the outermost unit's stay in
        any case, as its backward begins at once. Every rank must say the same. A forward without
        gradients frees them whatever is said here.

        With a number n, each n neighbouring ranks keep a whole copy between them, a part each, so
        backward gathers inside of one machine. Collective then; not otherwise.

        Args:
            reshard_after_forward: whether they are freed until backward, or n.
            recurse: also for the units inside.

        Raises:
            StateError: the number does not divide the ranks that share a unit. Nothing is changed.
        """
        _switches.free_after_forward(self._units(recurse), reshard_after_forward)

    def set_reshard_after_backward(
        self, reshard_after_backward: bool | None, *, recurse: bool = True
    ) -> None:
        """Say whether whole parameters are freed after backward. Not a collective.

        Without, they are, but for those that SHARD_GRAD_OP keeps inside of `no_sync`. Where they
        stay, the next forward gathers nothing, unless a parameter has changed. Every rank must say
        the same.

        Args:
            reshard_after_backward: whether they are freed; None gives the default back.
            recurse: also for the units inside.
        """
        for unit in self._units(recurse):
            unit.frees_after_backward = reshard_after_backward

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Say whether backward passes sum gradients over the copies of HYBRID_SHARD and NO_SHARD.

        Not a collective. Without that, gradients are summed over the ranks that divide the
        parameters, this rank's part is kept, and no `.grad` is set. The first backward that sums
        over copies hands out all of it. Every rank must say the same.

        Args:
            requires_all_reduce: whether to sum over copies.
            recurse: also for the units inside.
        """
        for unit in self._units(recurse):
            unit.reduction = replace(unit.reduction, sums_copies=requires_all_reduce)

    def set_gradient_divide_factor(self, factor: float | None) -> None:
        """Say by what this unit's own sums of gradients are divided. Not a collective.

        Without, by the number of ranks: gradients are means. Units inside are left alone, as FSDP2
        leaves them; every rank must say the same. Holds for all sums from now on.

        Args:
            factor: above 0, finite; 1 leaves sums; None gives the mean back.

        Raises:
            StateError: it is no such number.
        """
        _switches.divide_by(self._flat_param, factor)

    def set_all_reduce_hook(self, hook: Callable[[Tensor], object] | None) -> None:
        """Have a function change this unit's own sums before they are divided, in place.

        Not a collective, but the function may be one: it is called on every rank in the same order.
        Units inside are left alone.

        Args:
            hook: called with this rank's part of a sum, `(shard,)`, of the reduce dtype, once for
                each dtype of the unit's parameters; None: no more.

        Raises:
            StateError: it is no function.
        """
        unit, known = self._flat_param, _switches.checked_hook(hook, "set_all_reduce_hook")
        unit.reduction = replace(unit.reduction, on_sum=known)

    def register_comm_hook(self, state: object, hook: Callable[..., object] | None) -> None:
        """Have a function reduce the gradients of this unit and those inside. Not a collective.

        What it leaves is the gradient: it sums over ranks, over copies too, and divides, in place
        of everything that is set for that otherwise. Those of
        `torch.distributed.algorithms._comm_hooks` fit. The function is called on every rank in the
        same order; give it a process group of its own where some ranks leave units out.

        Args:
            state: its first argument.
            hook: called as `hook(state, full, part)`: this rank's gradients, `(ranks * shard,)`, of
                the reduce dtype, and where its part of the result goes, `(shard,)`; with NO_SHARD
                as `hook(state, full)`, to be changed in place. None gives the default back.

        Raises:
            StateError: it is no function.
        """
        known = _switches.checked_hook(hook, "register_comm_hook")
        for unit in self._units():
            own = known and partial(known, state)
            unit.reduction = replace(unit.reduction, in_place=own)

    def set_modules_to_forward_prefetch(self, modules: list[ShardedModule]) -> None:
        """Say which units are gathered when this one's forward begins to compute. Not a collective.

        In place of the one that came next the last time. Units that have begun already are left
        out, and what is listed and not used is freed when the outermost forward ends. Every rank
        must say the same.

        Args:
            modules: sharded modules of the same tree, in the order in which they are gathered; an
                empty list gives the default back.

        Raises:
            StateError: it is no list of such modules.
        """
        unit, name = self._flat_param, "set_modules_to_forward_prefetch"
        unit.schedule.lists.forward[unit] = _switches.listed_units(unit, modules, name)

    def set_modules_to_backward_prefetch(self, modules: list[ShardedModule]) -> None:
        """The same for the backward of this unit, whose outputs have their gradients.

        Units that backward has gathered already, keeps whole or does not come to are left out.

        Args:
            modules: as in `set_modules_to_forward_prefetch`.

        Raises:
            StateError: it is no list of such modules.
        """
        unit, name = self._flat_param, "set_modules_to_backward_prefetch"
        unit.schedule.lists.backward[unit] = _switches.listed_units(unit, modules, name)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on each rank; the first backward after it sums them all.

        The strategies that keep parameters whole (NO_SHARD, SHARD_GRAD_OP) then communicate
        nothing; FULL_SHARD still gathers parameters, as it promises not to keep them.
        """
        schedule = self._flat_param.schedule
        before, schedule.sync = schedule.sync, False
        try:
            yield
        finally:
            schedule.sync = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, those accumulated inside `no_sync` too. Not a collective.

        An optimizer's `zero_grad()` clears `.grad`, and cannot know of the latter.
        """
        for unit in units_below(self):
            unit.schedule.drop_accumulated()
        with self._hidden():
            super().zero_grad(set_to_none)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their norm over all ranks is at most `max_norm`. Collective.

        Where ranks differ in the gradients of `ignored_params`, the largest norm of these counts.

        Returns:
            The norm before clipping, the same on every rank.
        """
        with self._hidden():
            grads = {id(each): each.grad for each in self.parameters() if each.grad is not None}
        own, segments = self._flat_param, [each for unit in self._units() for each in unit.grads]
        norm = norm_of(grads, norm_type, of=segments, ignored=own.ignored, comms=own.comms)
        clip_(grads.values(), norm, max_norm)
        return norm

    @contextmanager
    def whole_params(self, *, write_back: bool = False) -> Iterator[None]:
        """Put whole parameters, in their own dtype, in the module for a while. Collective.

        They are copies: meanwhile the module cannot run, load, move or be saved, but for its
        `state_dict()`, which has them.

        Args:
            write_back: keep what was written to them or put in their place; every rank must write
                the same.

        Raises:
            StateError: called in forward or backward, or inside another one.
            ParameterError: one of another shape was put there, and is to be written back.
        """
        with full_params(self, write_back=write_back):
            yield

    def comm_counts(self) -> dict[str, CommCount]:
        """What this rank has communicated since the last call, by kind of collective."""
        log = self._flat_param.schedule.log
        counts = dict(log.counts)
        log.reset()
        return counts

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The plain module's state dict: same keys, whole tensors. Collective."""
        return full_state(self, super().state_dict, *args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a plain module's state dict; each rank keeps its part. Not a collective.

        Args:
            state_dict: whole tensors.
            strict: as in `torch.nn.Module.load_state_dict`.
            assign: has no meaning here; values are always copied.
        """
        return load_full_state(self, super().load_state_dict, state_dict, strict=strict)

    def _units(self, recurse: bool = True) -> list[Unit]:
        """This module's, and those inside."""
        return list(units_below(self)) if recurse else [self._flat_param]

    @contextmanager
    def _hidden(self) -> Iterator[None]:
        """Let `parameters()` be the optimizer's where `unshard` shows whole ones."""
        with ExitStack() as stack:
            for unit in units_below(self):
                stack.enter_context(unit.sites.hidden())
            yield

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ShardedModule:
        units_at_rest(self)
        super()._apply(fn, recurse)
        for unit in self._units(recurse):
            unit.rebind()
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedModule:
        raise StateError(
            f"flat_param.fully_shard: {type(self).__name__} cannot be copied, but a sharded module "
            "holds process groups. Copy the plain module before sharding, or load its state_dict()."
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise StateError(
            f"flat_param.fully_shard: {type(self).__name__} cannot be pickled, but a sharded "
            "module holds process groups. Save its state_dict(), or use save_sharded."
        )
