"""The parameters of one unit on this rank: gathered, shown in its module, freed.

| when | the module has |
|---|---|
| between steps | the optimizer's parameters, which are pieces |
| in the unit's forward and backward | the leaves, which are full |
| after `unshard()` | the leaves, until the unit is resharded; changes are dropped, as in FSDP2 |
| inside `whole_params()` | full copies in the parameters' own dtype |

- A parameter that a user replaces is an error, before any communication. Other memory, by
  `param.data = ...`, is copied into the shard before the next gather and before any code reads
  shards. Inside `whole_params()`, code that reads shards or gathers raises an error.
- Pieces get no gradient. If a backward reaches a piece, code outside of the unit used it like a
  full parameter, so an error is raised.
- `_schedule` decides when to gather and free.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from ..._errors import FlatParamError, ParameterError, StateError
from ..._torch_compat import version_of, without_torch_function
from ...comm._comm import Pending
from ...comm._groups import CommGroups
from ...comm._streams import capture_query
from ...layout._options import UnitOptions
from ..tensor._param_piece import ParamPiece, mark_shown
from ._segment import ShardedSegment


@dataclass
class ParamSite:
    """One location in a module at which a parameter is registered; a tied one has several."""

    registry: dict[str, nn.Parameter | None]
    key: str
    part: ShardedSegment
    index: int

    @property
    def param(self) -> nn.Parameter:
        """The optimizer's parameter."""
        return self.part.params[self.index]

    @property
    def leaf(self) -> nn.Parameter:
        """The full parameter."""
        return self.part.leaves[self.index]

    @property
    def piece(self) -> ParamPiece:
        """This rank's piece of the parameter."""
        return self.part.pieces[self.index]


class Unit:
    """The parameters of one module, or of a list of modules, that are unsharded together.

    Attributes:
        name: qualified name of the module below the outermost unit; "" for the outermost unit.
        parts: its segments.
        sites: where its parameters are registered.
        copies: the full copies that the module has inside `whole_params()`, by segment.
        ignored: ignored parameters of its module and of inner units; see _ignored.py.
        ignored_places: where they are registered, by `id` of a module's parameters, and key.
        trained: the trainable segments.
        is_unsharded: whether every leaf may be read.
        frees_after_forward: whether it is resharded between forward and backward.
        frees_after_backward: whether it is resharded after backward; None: see `Schedule._release`.
        unshards_in_backward: whether backward gathers it.
        schedule_ref: a weak reference to the schedule of its tree.
        syncs: whether backward reduces its gradients.
        divide_factor: divisor of sums of gradients; None: the number of ranks.
        sums_copies: whether gradients are reduced over replicas.
        on_sum: called with this rank's part of each sum before the division.
        forward_prefetch: units that are gathered when its forward begins; empty for the default.
        backward_prefetch: the same for its backward.
        looked_at: number of registrations at the last search for strays.
        nodes: graph nodes that accumulate the gradients of the leaves.
        leaf_count: number of leaves, including frozen ones.
        is_by_hand: whether a user called `unshard()`, and no forward or backward has begun since.
        is_shown: whether the module has the leaves because of that call.
    """

    def __init__(
        self,
        parts: Sequence[ShardedSegment],
        sites: Sequence[ParamSite],
        *,
        comms: CommGroups,
        options: UnitOptions,
        schedule: object,
        ignored: Sequence[nn.Parameter] = (),
        modules: Sequence[nn.Module] = (),
    ) -> None:
        self.name = ""
        self._modules = tuple(map(weakref.ref, modules))
        self.module_count = len(modules)
        self.looked_at = -1
        self.parts = tuple(parts)
        self.ignored = tuple(ignored)
        self.ignored_places = frozenset(_places(modules, ignored))
        self.sites = tuple(sites)
        self.copies: Mapping[ShardedSegment, Sequence[nn.Parameter]] | None = None
        self.comms = comms
        self.options = options
        self.join(schedule)
        self.trained = tuple([part for part in self.parts if part.segment.trainable])
        for part in self.parts:
            part.unit = weakref.ref(self)
        self.frees_after_forward = True
        self.frees_after_backward: bool | None = None
        self.unshards_in_backward = self.syncs = self.sums_copies = True
        self.divide_factor: float | None = None
        self.on_sum: Callable[[Tensor], object] | None = None
        self.forward_prefetch: tuple[Unit, ...] = ()
        self.backward_prefetch: tuple[Unit, ...] = ()
        self.is_unsharded = self.is_by_hand = self.is_shown = False
        self._gathering: list[Pending] | None = None
        self._version: tuple[int, bool] | None = None
        self._use_leaves()
        for part in self.trained:
            for param, piece in zip(part.params, part.pieces, strict=True):
                if piece.is_cut:
                    with without_torch_function():
                        param.register_hook(partial(_refuse_grad, weakref.ref(self), piece))

    def join(self, schedule: object) -> None:
        """Use the schedule of a tree. It refers to all units, so only modules keep it alive."""
        self.schedule_ref: weakref.ref[Any] = weakref.ref(schedule)
        for module in self.modules():
            object.__setattr__(module, "_flat_param_schedule", schedule)

    @property
    def schedule(self) -> Any:
        """The `Schedule` of the unit's tree."""
        schedule = self.schedule_ref()
        if schedule is None:
            raise StateError(
                f"flat_param.fully_shard: the module of unit '{self.name}' is deleted, but what is "
                "left of the unit was used. Keep the module until its last use."
            )
        return schedule

    def modules(self) -> list[nn.Module]:
        """Its modules that still exist."""
        return [module for each in self._modules if (module := each()) is not None]

    def _use_leaves(self) -> None:
        """Read parameters and leaves again, after they were made or replaced."""
        kind = self.parts[0].device.type if self.parts else "cpu"
        self._has_streams, self._is_capturing = kind != "cpu", capture_query(kind)
        self._gathered = [part for part in self.parts if not part.aliased]
        self.gathered_leaves = tuple([leaf for part in self._gathered for leaf in part.leaves])
        self.leaf_count = sum([len(part.leaves) for part in self.parts])
        self.nodes = [node for part in self.parts for node in part.nodes]
        self._params = tuple([param for part in self.parts for param in part.params])
        self._registered = [(each.registry, each.key, each.leaf, each.param) for each in self.sites]

    def start_gather(self, *, in_forward: bool = False, in_backward: bool = False) -> None:
        """Begin to unshard the parameters. Collective.

        In backward a gather waits for no computation, since parameters are as in forward. In
        forward a copy from the host waits for none but that before the pass.
        """
        if self.is_unsharded or self._gathering is not None:
            return
        self.take_changes()
        before, self._version = self._version, self._current_version()
        is_captured = self._version[1]  # a stream takes part in a capture by waiting
        waits = not in_backward or is_captured or before != self._version
        self._gathering = gathering = []
        for part in self._gathered:
            gathering.append(
                part.gather_into(part.full, waits=waits, copy_waits=waits and not in_forward)
            )

    def take_changes(self) -> None:
        """Copy in the values of parameters that have other memory; also follow `requires_grad`.

        Raises:
            ParameterError: a parameter was replaced, or has another shape, or was frozen and is
                trainable now. Replaced ones are in place again.
            StateError: copies are set.
        """
        if self.copies is not None:
            raise StateError(
                "flat_param.whole_params: the module has copies of whole parameters, but only its "
                "state_dict() can be called with them. Leave the block first."
            )
        with without_torch_function():
            for at, (registry, key, leaf, param) in enumerate(self._registered):
                current = registry.get(key)
                if current is leaf:
                    continue
                if current is not param:
                    error = _replaced(self.sites[at], current)
                    self.swap_out()
                    raise error
                if leaf.requires_grad != param.requires_grad:
                    _set_requires_grad(self.sites[at], param.requires_grad)
            for part in self.parts:
                if list(map(Tensor.data_ptr, part.params)) != part.pointers:
                    part.take_moved()
                    self._version = None

    def swap_out(self) -> None:
        """Set the optimizer's parameters, or the copies inside `whole_params()`."""
        if self.options.cpu_offload:
            for part in self._gathered:
                part.drop_copied()
        if self.copies is None:
            for registry, key, _, param in self._registered:
                registry[key] = param
        else:
            for site in self.sites:
                site.registry[site.key] = self.copies[site.part][site.index]

    def drop_copies(self) -> FlatParamError | None:
        """Set the optimizer's parameters; return the error if a copy was replaced."""
        copies, self.copies, error = self.copies or {}, None, None
        for site in self.sites if copies else ():
            copy: Tensor = copies[site.part][site.index]
            current = site.registry.get(site.key)
            if current is not copy or tuple(copy.shape) != site.piece.shape:
                error = _replaced(site, current)
        self.swap_out()
        return error

    def unshard(self, *, in_forward: bool = False) -> None:
        """Gather the full parameters. Collective, unless they are gathered already."""
        if not self.is_unsharded:
            self.start_gather(in_forward=in_forward)
            for pending in self._gathering or ():
                pending.wait()
            self._gathering, self.is_unsharded = None, True
        if self._has_streams:
            for part in self._gathered:
                part.use()

    @property
    def is_gathered(self) -> bool:
        """Whether the parameters are unsharded, or an all-gather is in flight."""
        return self.is_unsharded or self._gathering is not None

    def show(self) -> None:
        """Set the leaves in the module between steps. Not a collective after `start_gather`."""
        self.unshard()
        self.is_shown = True
        for part in self.parts:
            for leaf, piece in zip(part.leaves, part.pieces, strict=True):
                mark_shown(leaf, label=piece.label)
        for registry, key, leaf, _ in self._registered:
            registry[key] = leaf

    def end_show(self) -> None:
        """Set the optimizer's parameters again; tensors that a user assigned are dropped."""
        if self.is_shown:
            for part in self.parts:
                part.attach_leaves()
            self.swap_out()
        self.is_shown = self.is_by_hand = False

    def begin(self, *, in_backward: bool = False) -> None:
        """Gather the parameters as they are now, and set the leaves. Collective.

        In backward they are as in forward.
        """
        if self.is_by_hand:
            self.end_show()
        if not in_backward and self.is_gathered:
            self.take_changes()
            if self.is_stale:
                self.reshard()
        self.unshard(in_forward=not in_backward)
        self.set_leaves()

    def set_leaves(self) -> None:
        """Set the leaves in the module."""
        if self.is_by_hand:
            self.end_show()
        for registry, key, leaf, _ in self._registered:
            registry[key] = leaf

    def prefetch(self) -> bool:
        """Begin to gather the parameters as they are now; return whether it was needed. Collective.

        Units that a user has unsharded stay as they are.
        """
        if self.is_gathered:
            if self.is_by_hand or not self.is_stale:
                return False
            self.reshard()
        self.start_gather(in_forward=True)
        return True

    def was_written(self, before: Sequence[int]) -> StateError:
        """The error for leaves that forward has written to; `before` are their versions."""
        now = map(version_of, self.gathered_leaves)
        pieces = [piece for part in self._gathered for piece in part.pieces]
        pairs = zip(pieces, before, now, strict=True)
        label = next(piece.label for piece, old, new in pairs if old != new)
        return StateError(
            f"flat_param.fully_shard: parameter {label} was written to in forward, but there it is "
            "a copy of the shards of all ranks, and the write would be lost. Make it a buffer, or "
            "write between steps under whole_params(write_back=True)."
        )

    def reshard(self) -> None:
        """Put the optimizer's parameters back and free the unsharded ones. Not a collective."""
        if self.is_by_hand:
            self.end_show()
        self.swap_out()
        if self._gathering is not None:
            for pending in self._gathering:
                pending.leave()
            interrupted = self._gathered[len(self._gathering) :]
            for part in interrupted:
                part.make_full()  # a gather may still write to its memory
            if interrupted:
                self._use_leaves()
        self._gathering = None
        self.is_unsharded = False
        for part in self._gathered:
            part.free()

    @property
    def is_stale(self) -> bool:
        """Whether a step or an assignment changed a parameter after the gather."""
        return self.is_gathered and self._version != self._current_version()

    def _current_version(self) -> tuple[int, bool]:
        """A value that changes with every in-place change of a parameter, and with every step.

        Steps count on all ranks, also on those without elements. A gather in a captured graph runs
        in replays only, so a capture counts too.
        """
        with without_torch_function():
            changes = sum(map(version_of, self._params))
        for part in self.parts:
            changes += part.pieces[0].segment.steps
        return changes, self._is_capturing()

    def rebind(self) -> None:
        """Update shards and leaves after `module.to()` changed dtype or device."""
        self.reshard()
        for part in self.parts:
            part.rebind([param.detach() for param in part.params])
        self._use_leaves()

    def forget(self) -> None:
        """Drop all state of a stopped backward. Not a collective."""
        self.reshard()
        self.drop_leaf_grads()
        for part in self.trained:
            part.forget_grads()

    def drop_leaf_grads(self) -> None:
        """Drop gradients that the engine has left."""
        for leaf in (leaf for part in self.trained for leaf in part.leaves):
            leaf.grad = None


def _places(
    modules: Sequence[nn.Module], params: Sequence[nn.Parameter]
) -> Iterator[tuple[int, str]]:
    known = {id(param) for param in params}
    for child in (one for module in modules for one in module.modules() if known):
        for key, param in child._parameters.items():
            if id(param) in known:
                yield id(child._parameters), key


def _refuse_grad(unit_ref: weakref.ref[Unit], piece: ParamPiece, _: object) -> None:
    if unit_ref() is not None:
        raise piece.outside_unit("the loss was computed with it")


def _replaced(site: ParamSite, value: Any) -> FlatParamError:
    if type(value).__name__ == "FakeTensor":
        return StateError(
            f"flat_param.fully_shard: parameter {site.piece.label} is a fake tensor, as in "
            "torch.export, which cannot trace the collectives of a sharded module. Export the "
            "plain module, with flat_param.full_state_dict."
        )
    return ParameterError(
        f"flat_param.fully_shard: parameter {site.piece.label} was replaced by a "
        f"{type(value).__name__} after it was sharded, but the optimizer has the sharded one. The "
        "sharded one is back. Write values into it by load_state_dict, or in place under "
        "whole_params(write_back=True). Tie parameters before fully_shard, and call "
        "torch.func.functional_call with a module that is not sharded."
    )


def _set_requires_grad(site: ParamSite, trainable: bool) -> None:
    if not site.part.segment.trainable:
        raise ParameterError(
            f"flat_param.fully_shard: parameter {site.piece.label} was frozen when it was sharded "
            "and is trainable now, but frozen segments have no gradient buffers. Make it "
            "trainable before fully_shard; it can be frozen afterwards."
        )
    site.leaf.requires_grad_(trainable)
