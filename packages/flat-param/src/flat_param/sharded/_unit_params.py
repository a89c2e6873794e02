"""The parameters of one unit on this rank: gathered, shown, freed, with hooks on their leaves.

Pieces get no gradient. If a backward reaches a piece, code outside of the unit used it like a full
parameter, so an error is raised.

`_schedule` decides when to gather and free; `_unit` runs the forward and backward of the unit.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from .._errors import StateError
from .._torch_compat import will_run, without_torch_function
from ..buffers._owners import Owner
from ..comm._capturing import is_capturing
from ..comm._comm import Communicator, Pending
from ..comm._groups import CommGroups
from ..layout._options import UnitOptions
from ._kept_parts import KeptParts
from ._param_piece import ParamPiece
from ._param_sites import ParamSite, ParamSites
from ._piece_tensors import outside_unit
from ._sharded_grads import Reduction, ShardedGrads
from ._sharded_params import ShardedParams, placement_of
from ._tensors import InputHooks


class UnitParams(ABC):
    """The parameters of one module, or of a list of modules, that are unsharded together.

    Attributes:
        name: qualified name of the module below the outermost unit; "" for the outermost unit.
        owners: registered owners of the unit's parameters and of the ignored ones.
        parts: its segments.
        ignored: ignored parameters of its module and of inner units; see _ignored.py.
        ignored_places: where they are registered, by `id` of a module's parameters, and key.
        grads: gradients of the trainable segments.
        is_unsharded: whether every leaf may be read.
        around: units in whose forward this unit ran since the last backward.
        frees_after_forward: whether it is resharded between forward and backward.
        frees_after_backward: whether it is resharded after backward; None: see `Schedule.release`.
        reduction: how its gradients are reduced.
        regroup: the smaller group that keeps the full unit between forward and backward, if any.
        looked_at: number of registrations at the last search for strays.
        nodes: graph nodes that accumulate the gradients of the leaves.
        leaf_count: number of leaves, including frozen ones.
        inputs: hooks on the inputs of forwards.
        is_by_hand: whether a user called `unshard()`, and no forward or backward has begun since.
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
        self.around: set[UnitParams] = set()
        self.frees_after_forward = True
        self.frees_after_backward: bool | None = None
        self.reduction = Reduction()
        self.regroup: Communicator | None = None
        self._kept: KeptParts | None = None
        self.is_unsharded = False
        self.is_by_hand = False
        self._gathering: list[Pending | None] | None = None
        self._version: tuple[int, bool] | None = None
        self._change = ""  # of dtype or device, until all ranks have made it
        self.nodes: list[Any] = []
        self._piece_nodes: list[Any] = []
        self.inputs = InputHooks(self.on_input_grad)
        self._use_leaves()

    def join(self, schedule: object) -> None:
        """Use the schedule of a tree; the modules keep it alive."""
        self._schedule: weakref.ref[Any] = weakref.ref(schedule)
        for module in self.modules():
            object.__setattr__(module, "_flat_param_schedule", schedule)

    def modules(self) -> list[nn.Module]:
        """Its modules that still exist."""
        return [module for each in self._modules if (module := each()) is not None]

    @property
    def module_count(self) -> int:
        """Number of modules of this unit; more than one if a list was sharded."""
        return len(self._modules)

    def rename(self, name: str, label: str) -> None:
        """Set the unit's name relative to the outermost unit."""
        self.name = name
        self.comms.name(label)
        if self.regroup is not None:
            self.regroup.rename(label)

    def _use_leaves(self) -> None:
        """Hook the leaves of all parts, as they are now."""
        known = {grads.leaves: grads for grads in self.grads}
        trained = [part for part in self.parts if part.segment.trainable]
        self.grads = tuple(known.get(part.leaves) or ShardedGrads(part) for part in trained)
        self.leaf_count = sum(len(part.leaves) for part in self.parts)
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
            for param, piece in zip(part.held.params, part.param_pieces, strict=True):
                with without_torch_function():
                    is_cut = piece.is_cut and param.requires_grad
                    node = get_gradient_edge(param).node if is_cut else None
                if node is not None:
                    found.append(node)  # kept: a node and its hook last as long as a reference
                    if id(node) not in before:
                        node.register_prehook(partial(_refuse_grad, weakref.ref(self), piece))
        self._piece_nodes = found

    @abstractmethod
    def on_grad(self, grads: ShardedGrads, index: int) -> None:
        """Handle the gradient of a leaf of the unit."""

    @abstractmethod
    def on_input_grad(self) -> None:
        """An input, or an ignored parameter, has its gradient."""

    @abstractmethod
    def on_inner_grads(self) -> None:
        """Called when a unit inside this unit's forward has all its gradients."""

    # Unshard and reshard.

    def start_gather(self) -> None:
        """Begin to unshard the parameters. Collective."""
        if self.is_unsharded or self._gathering is not None:
            return
        self.take_changes()
        if self._change:
            change, self._change = self._change, ""
            self.comms.share_change(change)
        self._version = self._current_version()
        kept, self._kept = self._kept, None
        source = kept if kept is not None and kept.version == self._version else None
        self._gathering = gathering = []
        for part in self.parts:
            gathering.append(source.start_gather(part) if source else part.start_gather())

    def take_changes(self) -> None:
        """Copy parameters with other memory into the shard. Errors are raised on every rank."""
        if self.sites.have_changed():
            with self.comms.telling_others():
                if self.sites.take_changes():
                    self._version = self._kept = None

    def unshard(self) -> None:
        """Gather the full parameters. Collective, unless they are gathered already."""
        if not self.is_unsharded:
            self.start_gather()
            for pending in self._gathering or ():
                if pending is not None:
                    pending.wait()
            self._gathering, self.is_unsharded = None, True

    @property
    def is_gathered(self) -> bool:
        """Whether the parameters are unsharded, or an all-gather is in flight."""
        return self.is_unsharded or self._gathering is not None

    def show(self) -> None:
        """Show unsharded parameters between steps. Not a collective after `start_gather`."""
        self.unshard()
        self.sites.show()

    def end_show(self) -> None:
        """Put the optimizer's parameters back. Not a collective.

        Raises:
            ParameterError: one was replaced while shown.
        """
        self.is_by_hand = False
        if self.sites.shows:
            with self.comms.telling_others():
                if error := self.sites.end_show():
                    raise error

    def compute_with_leaves(self) -> None:
        """Set the leaves in the module."""
        self.end_show()
        self.sites.swap_in()

    def reshard(self) -> None:
        """Put the optimizer's parameters back and free the unsharded ones. Not a collective."""
        self.end_show()
        self.sites.swap_out()
        if self._gathering is not None:
            for pending in filter(None, self._gathering):
                pending.leave()
            # An interrupted gather may still write to its memory.
            if len(self._gathering) < len(self.parts):
                for part in self.parts[len(self._gathering) :]:
                    part.remake()
                self._use_leaves()
        self._gathering = None
        self.is_unsharded = False
        self._kept = None
        for part in self.parts:
            part.free()

    def reshard_until_backward(self) -> None:
        """Reshard, except for the part that a smaller group keeps. Not a collective."""
        kept = None if self.regroup is None else KeptParts(self.parts, self.regroup, self._version)
        self.reshard()
        self._kept = kept

    def reshard_if_stale(self) -> None:
        """Reshard if any parameter has changed since the gather."""
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
        before = placement_of(self.parts)
        for part in self.parts:
            part.rebind([param.detach() for param in part.held.params])
        if placement_of(self.parts) != before:
            self._change = placement_of(self.parts)
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

    def forget_inputs(self) -> None:
        """Drop the inputs of earlier forwards: no backward will reach them."""
        self.inputs.clear()
        self.around.clear()


def _places(
    modules: Sequence[nn.Module], params: Sequence[nn.Parameter]
) -> Iterator[tuple[int, str]]:
    known = {id(param) for param in params}
    for child in (one for module in modules for one in module.modules() if known):
        for key, param in child._parameters.items():
            if id(param) in known:
                yield id(child._parameters), key


def _refuse_grad(unit_ref: weakref.ref[UnitParams], piece: ParamPiece, _: object) -> None:
    if unit_ref() is not None:
        raise outside_unit(piece, "the loss was computed with it")


def _on_grad(
    unit_ref: weakref.ref[UnitParams],
    grads_ref: weakref.ref[ShardedGrads],
    index: int,
    leaf: Tensor,
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
    unit.on_grad(grads, index)
