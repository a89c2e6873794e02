"""The forward and backward of one unit on this rank.

A unit is resharded in backward once its parameters are no longer read: after the gradients of its
leaves, of leaves of units that ran inside its forward, of its inputs, and of ignored parameters. If
no input has a gradient and some leaf gets none, the graph may pass through the unit by another
tensor, such as one stored in its module. The unit then stays unsharded until the end of backward,
and so does a unit without an output tensor to hook.

A leaf that this backward does not reach may belong to a nested backward (reentrant checkpoints).
Gradients are then reduced when all inputs have gradients, or at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from .._errors import StateError
from ..comm._capturing import refuse_capture
from ._passes import UnitBackward, too_late
from ._schedule import Schedule
from ._sharded_grads import ShardedGrads
from ._strays import look_for_strays
from ._tensors import cast_floats, hook_nodes, tensors_in
from ._unit_params import UnitParams


class Unit(UnitParams):
    """The parameters of one module, or of a list of modules, that are unsharded together."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Functions, because a bound method would keep its unit alive until a garbage collection.
        self.begin_forward, self.end_forward = _uncompiled_ends()

    @property
    def schedule(self) -> Schedule:
        """The schedule of the unit's tree. It refers to all units, so only modules keep it alive.

        Raises:
            StateError: the modules of the tree were deleted.
        """
        schedule: Schedule | None = self._schedule()
        if schedule is None:
            raise StateError(
                f"flat_param.fully_shard: the module of unit '{self.name}' is deleted, but what is "
                "left of the unit was used. Keep the module until its last use."
            )
        return schedule

    # Forward.

    def _begin_forward(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Pre-forward: unshard, and hook the inputs. Collective."""
        if self.options.cpu_offload and self.parts:
            refuse_capture(self.name, self.parts[0].device)
        schedule = self.schedule
        look_for_strays(self, schedule)
        schedule.enter(self)
        self.unshard()
        self.compute_with_leaves()
        schedule.prefetch_forward(self)
        if torch.is_grad_enabled() and schedule.backward is None:
            self.inputs.add((args, kwargs, self.ignored))
        dtype = self.options.precision.input_dtype
        return cast_floats(args, dtype), cast_floats(kwargs, dtype)

    def _end_forward(self, module: nn.Module, output: Any) -> Any:
        """Post-forward: hook the outputs, reshard unless backward begins here, cast outputs."""
        schedule = self.schedule
        returns = keeps = False
        if torch.is_grad_enabled():
            tensors = list(tensors_in(output))
            told = partial(self._on_output_grad, schedule)
            returns = hook_nodes(tensors, told) or not tensors
            keeps = returns and (schedule.depth == 1 or not tensors or not self.frees_after_forward)
        schedule.leave(self, returns=returns, keeps=keeps, module=module)
        return cast_floats(output, self.options.precision.output_dtype)

    # Backward.

    def _on_output_grad(self, schedule: Schedule, _: object) -> None:
        """Pre-backward. The graph may be the only reference to the schedule."""
        state = schedule.standing(self)
        if state.begun or state.freed:
            return
        state.begun = True
        schedule.gather_for_backward(self)
        self.unshard()
        self.compute_with_leaves()
        self._advance(schedule, state)

    def on_input_grad(self) -> None:
        """Handle the gradient of an input or of an ignored parameter.

        It may be the gradient of another loss, so it starts no backward pass.
        """
        schedule = self.schedule
        backward = schedule.backward
        if backward is not None and not backward.was_stopped and self in backward.units:
            state = backward.units[self]
            state.inputs_arrived += 1
            self._advance(schedule, state)

    def on_inner_grads(self) -> None:
        """Handle that a unit inside this one's forward has all its gradients."""
        schedule = self.schedule
        state = schedule.standing(self)
        state.inner -= 1
        self._advance(schedule, state)

    def on_grad(self, grads: ShardedGrads, index: int) -> None:
        """Handle the gradient of a leaf."""
        schedule = self.schedule
        state = schedule.standing(self)
        if state.summed:
            raise too_late(self.name)
        grads.take(index)
        state.arrived += 1
        if state.arrived == state.expected:
            for outer in self.around:
                outer.on_inner_grads()
        self._advance(schedule, state)

    def _advance(self, schedule: Schedule, state: UnitBackward) -> None:
        """Reduce and reshard as soon as the module's docstring allows it."""
        if not state.begun or state.arrived < state.expected or state.freed:
            return
        inputs, missing = self.inputs.count, self.inputs.count - state.inputs_arrived
        if state.expected == len(self.nodes) or (inputs and missing <= 0):
            schedule.on_grads(self)
        if state.inner or missing > 0 or not (inputs or state.expected == self.leaf_count):
            return
        state.freed = True
        schedule.release(self)


@cache
def _uncompiled_ends() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Pre- and post-forward as functions of the unit.

    Compiled code calls them without tracing them, since they change hooks and storages at every
    call.
    """
    return torch.compiler.disable(Unit._begin_forward), torch.compiler.disable(Unit._end_forward)
