"""The parameters of one unit on this rank: gathered, shown, freed, with hooks on their leaves.

Pieces get no gradient. If a backward reaches a piece, code outside of the unit used it like a full
parameter, so an error is raised.

`_schedule` decides when to gather and free.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from ..._errors import StateError
from ..._torch_compat import will_run, without_torch_function
from ...buffers._owners import Owner
from ...comm._comm import Pending
from ...comm._groups import CommGroups
from ...comm._streams import is_capturing
from ...layout._options import UnitOptions
from ..tensor._param_piece import ParamPiece, mark_shown
from ._param_sites import ParamSite, ParamSites
from ._sharded_grads import Reduction, ShardedGrads
from ._sharded_params import ShardedParams


class Unit:
    """The parameters of one module, or of a list of modules, that are unsharded together.

    Attributes:
        name: qualified name of the module below the outermost unit; "" for the outermost unit.
        owners: registered owners of the unit's parameters and of the ignored ones.
        parts: its segments.
        ignored: ignored parameters of its module and of inner units; see _ignored.py.
        ignored_places: where they are registered, by `id` of a module's parameters, and key.
        grads: gradients of the trainable segments.
        is_unsharded: whether every leaf may be read.
        frees_after_forward: whether it is resharded between forward and backward.
        frees_after_backward: whether it is resharded after backward; None: see `Schedule._release`.
        unshards_in_backward: whether backward gathers it.
        syncs: whether backward reduces its gradients.
        reduction: how its gradients are reduced.
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
        parts: Sequence[ShardedParams],
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
        self.owners: tuple[Owner, ...] = ()
        self.parts = tuple(parts)
        self.ignored = tuple(ignored)
        self.ignored_places = frozenset(_places(modules, ignored))
        self.sites = ParamSites(sites)
        self.comms = comms
        self.options = options
        self.join(schedule)
        self.grads: tuple[ShardedGrads, ...] = ()
        self.frees_after_forward = True
        self.frees_after_backward: bool | None = None
        self.unshards_in_backward = self.syncs = True
        self.reduction = Reduction()
        self.forward_prefetch: tuple[Unit, ...] = ()
        self.backward_prefetch: tuple[Unit, ...] = ()
        self.is_unsharded = self.is_by_hand = self.is_shown = False
        self._gathering: list[Pending | None] | None = None
        self._version: tuple[int, bool] | None = None
        self.nodes: list[Any] = []
        self._piece_nodes: list[Any] = []
        self._use_leaves()

    def join(self, schedule: object) -> None:
        """Use the schedule of a tree. It refers to all units, so only modules keep it alive."""
        self._schedule: weakref.ref[Any] = weakref.ref(schedule)
        for module in self.modules():
            object.__setattr__(module, "_flat_param_schedule", schedule)

    @property
    def schedule(self) -> Any:
        """The `Schedule` of the unit's tree."""
        schedule = self._schedule()
        if schedule is None:
            raise StateError(
                f"flat_param.fully_shard: the module of unit '{self.name}' is deleted, but what is "
                "left of the unit was used. Keep the module until its last use."
            )
        return schedule

    def modules(self) -> list[nn.Module]:
        """Its modules that still exist."""
        return [module for each in self._modules if (module := each()) is not None]

    def rename(self, name: str, label: str) -> None:
        """Set the unit's name relative to the outermost unit."""
        self.name = name
        self.comms.name(label)

    def _use_leaves(self) -> None:
        """Hook the leaves of all parts, as they are now."""
        known = {grads.leaves: grads for grads in self.grads}
        trained = [part for part in self.parts if part.segment.trainable]
        self.grads = tuple([known.get(part.leaves) or ShardedGrads(part) for part in trained])
        self.leaf_count = sum([len(part.leaves) for part in self.parts])
        self.nodes = []
        for grads in self.grads:
            self.nodes += [get_gradient_edge(leaf).node for leaf in grads.leaves]
            for index, leaf in enumerate(() if grads.leaves in known else grads.leaves):
                # Weak: the garbage collector does not see the reference that C++ holds to hooks. A
                # strong hook would keep the unit, its module and its process groups alive.
                on_grad = partial(_on_grad, weakref.ref(self), weakref.ref(grads), index)
                leaf.register_post_accumulate_grad_hook(on_grad)
        self._refuse_grads_of_pieces()
        self.sites.refresh()

    def _refuse_grads_of_pieces(self) -> None:
        before, found = set(map(id, self._piece_nodes)), []
        for part in self.parts:
            for param, piece in zip(part.held.params, part.pieces, strict=True):
                with without_torch_function():
                    is_cut = piece.is_cut and param.requires_grad
                    node = get_gradient_edge(param).node if is_cut else None
                if node is not None:
                    found.append(node)  # kept: a node and its hook last as long as a reference
                    if id(node) not in before:
                        node.register_prehook(partial(_refuse_grad, weakref.ref(self), piece))
        self._piece_nodes = found

    def start_gather(self, *, in_backward: bool = False) -> None:
        """Begin to unshard the parameters. Collective.

        In backward a gather waits for no computation, since parameters are as in forward.
        """
        if self.is_unsharded or self._gathering is not None:
            return
        self.take_changes()
        before, self._version = self._version, self._current_version()
        is_captured = self._version[1]  # a stream takes part in a capture by waiting
        waits = not in_backward or is_captured or before != self._version
        self._gathering = gathering = []
        for part in self.parts:
            gathering.append(part.start_gather(waits=waits))

    def take_changes(self) -> None:
        """Copy parameters with other memory into the shard, and follow `requires_grad`."""
        if self.sites.take_changes():
            self._version = None

    def unshard(self) -> None:
        """Gather the full parameters. Collective, unless they are gathered already."""
        if not self.is_unsharded:
            self.start_gather()
            for pending in self._gathering or ():
                if pending is not None:
                    pending.wait()
            self._gathering, self.is_unsharded = None, True
        for part in self.parts:
            part.use()

    @property
    def keeps_sums(self) -> bool:
        """Whether sums over the ranks that share the parameters wait for those over replicas."""
        return not self.reduction.sums_copies and self.comms.replicate.group is not None

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
        self.sites.swap_in()

    def end_show(self) -> None:
        """Set the optimizer's parameters again; tensors that a user assigned are dropped."""
        if self.is_shown:
            for part in self.parts:
                part.attach_leaves()
            self.sites.swap_out()
        self.is_shown = self.is_by_hand = False

    def compute_with_leaves(self) -> None:
        """Set the leaves in the module."""
        if self.is_by_hand:
            self.end_show()
        self.sites.swap_in()

    def leaf_versions(self) -> list[int]:
        """Numbers that change with every write to a leaf that is lost when the unit is freed."""
        return [leaf._version for part in self.parts if not part.aliased for leaf in part.leaves]

    def check_unwritten(self, before: list[int]) -> None:
        """Refuse leaves that forward has written to.

        Raises:
            StateError: one was written to since `leaf_versions` returned `before`.
        """
        now = self.leaf_versions()
        if now == before:
            return
        pieces = [piece for part in self.parts if not part.aliased for piece in part.pieces]
        pairs = zip(pieces, before, now, strict=True)
        label = next(piece.label for piece, old, new in pairs if old != new)
        raise StateError(
            f"flat_param.fully_shard: parameter {label} was written to in forward, but there it is "
            "a copy of the shards of all ranks, and the write would be lost. Make it a buffer, or "
            "write between steps under whole_params(write_back=True)."
        )

    def reshard(self) -> None:
        """Put the optimizer's parameters back and free the unsharded ones. Not a collective."""
        if self.is_by_hand:
            self.end_show()
        self.sites.swap_out()
        if self._gathering is not None:
            for pending in self._gathering:
                if pending is not None:
                    pending.leave()
            # An interrupted gather may still write to its memory.
            if len(self._gathering) < len(self.parts):
                for part in self.parts[len(self._gathering) :]:
                    part.remake()
                self._use_leaves()
        self._gathering = None
        self.is_unsharded = False
        for part in self.parts:
            part.free()

    def reshard_if_stale(self) -> None:
        """Reshard if any parameter has changed since the gather."""
        if self.is_by_hand:
            self.end_show()
        if self.is_gathered:
            self.take_changes()
            if self.is_stale:
                self.reshard()

    @property
    def is_stale(self) -> bool:
        """Whether a step or an assignment changed a parameter after the gather."""
        return self.is_gathered and self._version != self._current_version()

    def _current_version(self) -> tuple[int, bool]:
        """A gather in a captured graph runs in replays only, so a capture counts too."""
        captured = bool(self.parts) and is_capturing(self.parts[0].device)
        return sum([part.version for part in self.parts]), captured

    def rebind(self) -> None:
        """Update shards and leaves after `module.to()` changed dtype or device."""
        self.reshard()
        for part in self.parts:
            part.rebind([param.detach() for param in part.held.params])
        self._use_leaves()

    def count_expected(self) -> int:
        """Leaves that will get a gradient in the running backward."""
        return sum(map(will_run, self.nodes))

    def forget(self) -> None:
        """Drop all state of a stopped backward. Not a collective."""
        self.reshard()
        self.drop_leaf_grads()
        for grads in self.grads:
            grads.forget()

    def drop_leaf_grads(self) -> None:
        """Drop gradients that the engine has left."""
        for leaf in (leaf for grads in self.grads for leaf in grads.owner.leaves):
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


def _on_grad(
    unit_ref: weakref.ref[Unit], grads_ref: weakref.ref[ShardedGrads], index: int, leaf: Tensor
) -> None:
    """Handle the gradient of a leaf; its unit or its buffers may be deleted."""
    unit, grads = unit_ref(), grads_ref()
    if unit is None:
        return
    if grads is None:
        leaf.grad = None
        raise StateError(
            "flat_param.fully_shard: this backward belongs to a forward before .to() or an "
            "interrupted step, but full parameters have had other memory since then. Run the "
            "forward again."
        )
    unit.schedule.on_grad(unit, grads, index)
