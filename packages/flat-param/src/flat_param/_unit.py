"""Edge: one unit on this rank: whole parameters go into the module, gradients come out.

Rule 1: outside forward and backward the module holds the optimizer's parameters, inside it holds
        the leaves. Only the registry entry changes; both are made once.
Rule 2: whole parameters are freed in backward when every leaf that will get a gradient has it and
        the gradients of the unit's inputs are there: then nothing can read them any more.
Rule 3: a unit whose outputs show no tensor to hook keeps its whole parameters until the end of
        backward, since nothing would call for them again.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from ._comm import Pending
from ._errors import ParameterError
from ._groups import Lanes
from ._sharded_grads import ShardedGrads
from ._sharded_params import ShardedParams
from ._strategy import UnitOptions
from ._tensors import cast_floats, tensors_in
from ._torch_compat import is_view, will_run

if TYPE_CHECKING:
    from ._schedule import Schedule


@dataclass(frozen=True)
class Slot:
    """One place in a module where a parameter is registered; a tied parameter has several."""

    registry: dict[str, nn.Parameter | None]
    key: str
    part: ShardedParams
    index: int

    @property
    def name(self) -> str:
        """The parameter's name in its unit."""
        return self.part.segment.layout.specs[self.index].name


@dataclass
class BackwardState:
    """Where a unit stands in the backward pass that runs now."""

    begun: bool = False
    expected: int = 0
    arrived: int = 0
    inputs_left: int = 0
    freed: bool = False

    @property
    def has_grads(self) -> bool:
        """Whether every leaf that will get a gradient has it."""
        return self.begun and self.arrived >= self.expected


class Unit:
    """The parameters of one module that are gathered and freed together.

    Attributes:
        name: qualified name of the module below the root, once the root has run.
        parts: its segments.
        grads: gradients of the trainable segments.
        is_whole: whether every leaf may be read.
        state_dict_is_whole: whether the module's `state_dict()` gathers.
    """

    def __init__(
        self,
        parts: Sequence[ShardedParams],
        slots: Sequence[Slot],
        *,
        lanes: Lanes,
        options: UnitOptions,
        schedule: Schedule,
    ) -> None:
        self.name = ""
        self.parts = tuple(parts)
        self.slots = tuple(slots)
        self.lanes = lanes
        self.options = options
        self.schedule = schedule
        self.backward = BackwardState()
        self.is_whole = False
        self.state_dict_is_whole = True
        self._gathering: list[Pending] | None = None
        self._version = -1
        self._nodes: list[Any] = []
        self._hooks: list[RemovableHandle] = []
        self._use_leaves()

    def _use_leaves(self) -> None:
        """Take up the leaves of all parts, as they are now."""
        for hook in self._hooks:
            hook.remove()
        self.grads = tuple(ShardedGrads(part) for part in self.parts if part.segment.trainable)
        self._nodes, self._hooks = [], []
        for grads in self.grads:
            for index, leaf in enumerate(grads.owner.leaves):
                self._nodes.append(get_gradient_edge(leaf).node)
                # Weak: what C++ holds of a leaf is hidden from the garbage collector, so a strong
                # hook would keep the unit, its module and its process groups alive for ever.
                on_grad = partial(_on_grad, weakref.ref(self), weakref.ref(grads), index)
                self._hooks.append(leaf.register_post_accumulate_grad_hook(on_grad))
        self._entries = tuple(
            (slot.registry, slot.key, slot.part.params[slot.index], slot.part.leaves[slot.index])
            for slot in self.slots
        )

    # Whole parameters.

    def start_gather(self) -> None:
        """Begin to make the parameters whole. Collective."""
        if not self.is_whole and self._gathering is None:
            self._absorb_changes()
            self._version = self._current_version()
            pending = [part.start_gather() for part in self.parts]
            self._gathering = [one for one in pending if one is not None]

    def unshard(self) -> None:
        """Make the parameters whole. Collective, unless they are."""
        self.start_gather()
        for pending in self._gathering or ():
            pending.wait()
        self._gathering = None
        self.is_whole = True

    def reshard(self) -> None:
        """Put the optimizer's parameters back and free the whole ones. Not a collective."""
        self.swap_out()
        for pending in self._gathering or ():
            pending.wait()
        self._gathering = None
        self.is_whole = False
        for part in self.parts:
            part.free()

    def reshard_if_stale(self) -> None:
        """Free whole parameters that are older than the optimizer's last step."""
        if self.is_whole and self._version != self._current_version():
            self.reshard()

    def _current_version(self) -> int:
        return sum(part.version for part in self.parts)

    def swap_in(self) -> None:
        """Let the module compute with the leaves (Rule 1)."""
        for registry, key, _, leaf in self._entries:
            registry[key] = leaf

    def swap_out(self) -> None:
        """Let everybody see the optimizer's parameters (Rule 1)."""
        for registry, key, param, _ in self._entries:
            registry[key] = param

    # Changes from outside.

    def _absorb_changes(self) -> None:
        for slot, (registry, key, param, leaf) in zip(self.slots, self._entries, strict=True):
            current = registry.get(key)
            if current is leaf:
                continue
            if current is not param or param.data_ptr() != slot.part.pointers[slot.index]:
                self._absorb(slot, current)
            if leaf.requires_grad != param.requires_grad:
                self._retrain(slot, param.requires_grad)

    def _absorb(self, slot: Slot, current: Tensor | None) -> None:
        """Copy a re-assigned parameter's values into the shard and restore the registration."""
        param, piece = slot.part.params[slot.index], slot.part.pieces[slot.index]
        values = None if current is None else current.detach()
        if values is not None and values.shape == piece.spec.shape:
            slot.part.load_whole(slot.index, values)
        elif values is not None and values.shape == piece.shape:
            piece.view(slot.part.shard).copy_(values)
        else:
            shape = None if values is None else tuple(values.shape)
            raise ParameterError(
                f"flat_param.fully_shard: parameter '{slot.name}' was re-assigned with shape "
                f"{shape}, but it was sharded with shape {piece.spec.shape}. Assign a whole "
                "parameter of the same shape, or shard the module again."
            )
        param.data = piece.view(slot.part.shard)
        slot.registry[slot.key] = param

    def _retrain(self, slot: Slot, trainable: bool) -> None:
        if not slot.part.segment.trainable:
            raise ParameterError(
                f"flat_param.fully_shard: parameter '{slot.name}' was frozen when it was sharded "
                "and is trainable now, but frozen segments have no gradient buffers. Make it "
                "trainable before fully_shard."
            )
        slot.part.leaves[slot.index].requires_grad_(trainable)

    def rebind(self) -> None:
        """Follow a change of dtype or device that `module.to()` has made to the parameters."""
        self.reshard()
        for part in self.parts:
            part.rebind([param.detach() for param in part.params])
        self._use_leaves()

    # Forward.

    def before_forward(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Make the unit ready to compute. Collective."""
        self.schedule.enter(self)
        self.unshard()
        self.swap_in()
        self.schedule.prefetch_forward(self)
        if torch.is_grad_enabled() and not self.schedule.in_backward:
            self._hook_inputs((args, kwargs))
        precision = self.options.mixed_precision
        if precision.param_dtype is None or not precision.cast_forward_inputs:
            return args, kwargs
        return cast_floats(args, precision.param_dtype), cast_floats(kwargs, precision.param_dtype)

    def after_forward(self, output: Any) -> None:
        """Hook the outputs, and free the whole parameters if the strategy says so."""
        returns = torch.is_grad_enabled() and self._may_be_needed(output)
        self.schedule.leave(self, returns=returns, keeps=returns and self._keeps(output))

    def _may_be_needed(self, output: Any) -> bool:
        """Hook the outputs; False where none of them leads back into the unit (Rule 3)."""
        return self._hook_outputs(output) or next(tensors_in(output), None) is None

    def _keeps(self, output: Any) -> bool:
        is_root = self.schedule.depth == 1
        hidden = next(tensors_in(output), None) is None
        return is_root or hidden or not self.options.strategy.frees_after_forward

    def _hook_inputs(self, inputs: Any) -> None:
        for tensor in tensors_in(inputs):
            if tensor.requires_grad:
                self.backward.inputs_left += 1
                tensor.register_hook(self._on_input_grad)

    def _hook_outputs(self, output: Any) -> bool:
        """Place a hook on the autograd node of each output; say whether there was one."""
        nodes = [node for tensor in tensors_in(output) for node in _producers(tensor)]
        for node in nodes:
            node.register_prehook(self._on_output_grad)
        return bool(nodes)

    # Backward.

    def _on_output_grad(self, _: object) -> None:
        self.schedule.begin_backward()
        state = self.backward
        if state.begun or state.freed:
            return
        state.begun = True
        state.expected = sum(will_run(node) for node in self._nodes)
        self.schedule.gather_for_backward(self)
        self.unshard()
        self.swap_in()
        self._advance()

    def _on_input_grad(self, _: Tensor) -> None:
        self.backward.inputs_left -= 1
        self._advance()

    def on_grad(self, grads: ShardedGrads, index: int) -> None:
        """A leaf of the unit has its gradient."""
        self.schedule.begin_backward()
        grads.take(index)
        self.backward.arrived += 1
        self._advance()

    def _advance(self) -> None:
        state = self.backward
        if not state.has_grads or state.freed:
            return
        self.schedule.on_grads(self)
        if state.inputs_left <= 0:  # Rule 2
            state.freed = True
            self.schedule.release(self)

    def forget(self) -> None:
        """Drop everything that belongs to the current step, as after an error."""
        self.reshard()
        self.backward = BackwardState()
        for grads in self.grads:
            grads.forget()


def _on_grad(
    unit_ref: weakref.ref[Unit], grads_ref: weakref.ref[ShardedGrads], index: int, _: Tensor
) -> None:
    """Tell a unit, if it is still there, that a leaf has its gradient."""
    unit, grads = unit_ref(), grads_ref()
    if unit is not None and grads is not None:
        unit.on_grad(grads, index)


def _producers(tensor: Tensor) -> list[Any]:
    """The nodes whose run in backward means that a gradient of `tensor` has arrived.

    An in-place operation on a view replaces the view's node, but not the one it is a view of.
    """
    node = tensor.grad_fn
    if node is None:
        return []
    behind = [next_node for next_node, _ in node.next_functions if next_node is not None]
    return [node, *behind] if is_view(tensor) else [node]
