"""Edge: one unit on this rank: whole parameters go into the module, gradients come out.

Rule 1: whole parameters are freed in backward when every leaf that will get a gradient has it and
        the gradients of the unit's inputs are there: then nothing can read them any more.
Rule 2: a unit whose outputs show no tensor to hook keeps its whole parameters until the end of
        backward, since nothing would call for them again.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from ._comm import Pending
from ._groups import Lanes
from ._sharded_grads import ShardedGrads
from ._sharded_params import ShardedParams
from ._slots import Slot, Slots
from ._strategy import UnitOptions
from ._tensors import cast_floats, tensors_in
from ._torch_compat import is_view, will_run

if TYPE_CHECKING:
    from ._schedule import Schedule


@dataclass
class BackwardState:
    """Where a unit stands in the backward pass that runs now."""

    begun: bool = False
    expected: int = 0
    arrived: int = 0
    inputs_arrived: int = 0
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
        self.slots = Slots(slots)
        self.lanes = lanes
        self.options = options
        self.schedule = schedule
        self.backward = BackwardState()
        self.is_whole = False
        self.state_dict_is_whole = True
        self._gathering: list[Pending] | None = None
        self._version = -1
        self._change = ""  # of dtype or device, until all ranks have made it
        self._nodes: list[Any] = []
        self._hooks: list[RemovableHandle] = []
        self._inputs = 0
        self._hooked: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
        self._input_hooks: dict[int, RemovableHandle] = {}
        # Compiled code calls both ends of a forward, and does not trace them: what they do to
        # hooks, storages and the registry must happen at every call.
        self.begin_forward = torch.compiler.disable(self._begin_forward)
        self.end_forward = torch.compiler.disable(self._end_forward)
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
        self.slots.refresh()

    # Whole parameters.

    def start_gather(self) -> None:
        """Begin to make the parameters whole. Collective."""
        if not self.is_whole and self._gathering is None:
            self._follow_changes()
            self._version = self._current_version()
            pending = [part.start_gather() for part in self.parts]
            self._gathering = [one for one in pending if one is not None]

    def _follow_changes(self) -> None:
        """Take in what has changed since the last gather; what is wrong, every rank learns."""
        try:
            self.slots.absorb_changes()
        except Exception as error:
            self.lanes.refuse(str(error))
            raise
        if self._change:
            change, self._change = self._change, ""
            self.lanes.share_change(change)

    def unshard(self) -> None:
        """Make the parameters whole. Collective, unless they are."""
        self.start_gather()
        for pending in self._gathering or ():
            pending.wait()
        self._gathering = None
        self.is_whole = True

    def reshard(self) -> None:
        """Put the optimizer's parameters back and free the whole ones. Not a collective."""
        self.slots.swap_out()
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

    def rebind(self) -> None:
        """Follow a change of dtype or device that `module.to()` has made to the parameters."""
        self.reshard()
        before = self._placement()
        for part in self.parts:
            part.rebind([param.detach() for param in part.params])
        if self._placement() != before:
            self._change = self._placement()
        self._use_leaves()

    def _placement(self) -> str:
        """Dtypes and kinds of device of the shards, in words that are the same on every rank."""
        kinds = (f"{part.shard.dtype} on {part.shard.device.type}" for part in self.parts)
        return f"parameters are {', '.join(kinds)}"

    # Forward.

    def _begin_forward(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Make the unit ready to compute. Collective."""
        self.schedule.enter(self)
        self.unshard()
        self.slots.swap_in()
        self.schedule.prefetch_forward(self)
        if torch.is_grad_enabled() and not self.schedule.in_backward:
            self._hook_inputs((args, kwargs))
        precision = self.options.mixed_precision
        if precision.param_dtype is None or not precision.cast_forward_inputs:
            return args, kwargs
        return cast_floats(args, precision.param_dtype), cast_floats(kwargs, precision.param_dtype)

    def _end_forward(self, output: Any) -> None:
        """Hook the outputs, and free the whole parameters if the strategy says so."""
        returns = torch.is_grad_enabled() and self._may_be_needed(output)
        self.schedule.leave(self, returns=returns, keeps=returns and self._keeps(output))

    def _may_be_needed(self, output: Any) -> bool:
        """Hook the outputs; False where none of them leads back into the unit (Rule 2)."""
        return self._hook_outputs(output) or next(tensors_in(output), None) is None

    def _keeps(self, output: Any) -> bool:
        is_root = self.schedule.depth == 1
        hidden = next(tensors_in(output), None) is None
        return is_root or hidden or not self.options.strategy.frees_after_forward

    def _hook_inputs(self, inputs: Any) -> None:
        """Be told once of each input's gradient; a leaf may be an input of many steps."""
        for tensor in tensors_in(inputs):
            if tensor.requires_grad and self._hooked.get(id(tensor)) is not tensor:
                self._inputs += 1
                self._hooked[id(tensor)] = tensor
                on_grad = partial(_on_input_grad, weakref.ref(self))
                self._input_hooks[id(tensor)] = tensor.register_hook(on_grad)

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
        self.slots.swap_in()
        self._advance()

    def on_input_grad(self) -> None:
        """One of the unit's inputs has its gradient."""
        self.backward.inputs_arrived += 1
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
        if state.inputs_arrived >= self._inputs:  # Rule 1
            state.freed = True
            self.schedule.release(self)

    def forget(self) -> None:
        """Drop everything that belongs to the current step, as after an error."""
        self.reshard()
        self.backward = BackwardState()
        self.forget_inputs()
        for grads in self.grads:
            grads.forget()

    def forget_inputs(self) -> None:
        """No backward pass will come back to what went in so far."""
        self._inputs = 0
        for hook in self._input_hooks.values():
            hook.remove()
        self._input_hooks.clear()
        self._hooked.clear()


def _on_grad(
    unit_ref: weakref.ref[Unit], grads_ref: weakref.ref[ShardedGrads], index: int, _: Tensor
) -> None:
    """Tell a unit, if it is still there, that a leaf has its gradient."""
    unit, grads = unit_ref(), grads_ref()
    if unit is not None and grads is not None:
        unit.on_grad(grads, index)


def _on_input_grad(unit_ref: weakref.ref[Unit], _: Tensor) -> None:
    unit = unit_ref()
    if unit is not None:
        unit.on_input_grad()


def _producers(tensor: Tensor) -> list[Any]:
    """The nodes whose run in backward means that a gradient of `tensor` has arrived.

    An in-place operation on a view replaces the view's node, but not the one it is a view of.
    """
    node = tensor.grad_fn
    if node is None:
        return []
    behind = [next_node for next_node, _ in node.next_functions if next_node is not None]
    return [node, *behind] if is_view(tensor) else [node]
