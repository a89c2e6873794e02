"""When the units of one tree unshard, reshard and reduce gradients.

- Units are unsharded for backward in the reverse of the order in which the forward pass left them,
  and gradients are reduced in the reverse of the order in which forward reached them, on every
  rank: an outer unit is needed before its inner units, and gets its last gradient after them. A
  unit that a rank's batch does not use is gathered and reduced on that rank too, as other ranks may
  need it.
- While a unit computes, the next one is gathered: in forward the one that came next in the last
  pass, in backward the next one in order. Lists of the user make a gather earlier and never add one
  in backward, also on a rank without a gradient for some unit.
- A unit is resharded in backward once its parameters are no longer read: after the gradients of its
  leaves, of leaves of units that ran inside its forward, of its inputs, and of ignored parameters.
  If no input has a gradient and some leaf gets none, the graph may pass through the unit by another
  tensor, such as one stored in its module. The unit then stays unsharded until the end of backward,
  and so does a unit without an output tensor to hook.
- A leaf that this backward does not reach may belong to a nested backward (reentrant checkpoints).
  Gradients are then reduced when all inputs have gradients, or at the end.
- One reduction is in flight at a time, and one over replicas. The previous one is finished and its
  memory freed before the next one starts; then that over replicas begins.
- `.grad` is set at the end of backward, and only for parameters that some rank used.
- While gradients are accumulated (`sync` is False) nothing is reduced. Until replicas are reduced,
  no `.grad` is set.
- A stopped backward leaves no gradients: its gradients are dropped, and so are earlier accumulated
  ones, which share their memory. A stopped forward drops none.
- A backward with `create_graph=True` keeps units unsharded: the backward through its graph reads
  them at once, and no hook runs before it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from ..._errors import StateError
from ..._torch_compat import at_end_of_backward, is_view, version_of, will_run
from ...comm._comm import BufferPool, CommLog
from ...comm._streams import is_capturing, wait_in
from ..tensor._nested import cast_floats, tensors_in
from ..unit._segment import ShardedSegment
from ..unit._strays import look_for_strays, registrations
from ..unit._unit import Unit
from ._order import agree
from ._passes import BackwardPass, ForwardPass, Pass, UnitBackward, UnitForward, UnitInputs


class Schedule:
    """The units of one tree, and the running pass; see _passes.py.

    Attributes:
        units: in the order in which they were sharded.
        log: counts of their collectives.
        pool: temporary buffers of their gradients.
        sync: whether backwards reduce gradients over ranks, if their units do.
        current: the pass; see _passes.py.
    """

    def __init__(self) -> None:
        self.units: list[Unit] = []
        self.log = CommLog()
        self.pool = BufferPool()
        self.sync = True
        self.current = Pass()
        self._last_order: list[Unit] = []
        self._accumulated: dict[Unit, None] = {}
        # Functions, because a bound method would keep the schedule alive.
        self.pre_forward, self.post_forward = _uncompiled_ends()

    def merge(self, other: Schedule) -> None:
        """Add the units of a nested tree."""
        for unit in other.units:
            unit.join(self)
            unit.comms.log.counts = self.log.counts
        self.units += other.units

    @property
    def depth(self) -> int:
        """Number of nested running forwards."""
        return 0 if self.current.forward is None else len(self.current.forward.units)

    def computes(self, unit: Unit) -> bool:
        """Whether the unit's forward or backward is running, so that the module has the leaves."""
        if self.current.backward is not None:
            state = self.current.backward.units.get(unit)
            return state is not None and state.begun and not state.freed
        return self.current.forward is not None and unit in self.current.forward.units

    def was_freed(self, unit: Unit) -> None:
        """Record that a unit was resharded, so that backward gathers it again."""
        if unit in self.current.chain:
            self.current.chain[unit] = True

    def settle(self) -> None:
        """End a pass that an exception has stopped, if there is one. Not a collective."""
        if self.current.backward is not None and self.current.backward.was_stopped:
            self.abandon()
        if self.current.forward is not None and not self.current.forward.units:
            self._drop_forward()

    # Forward.

    def _pre_forward(
        self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Unshard a unit, and hook its inputs. Collective."""
        options = unit.options
        if options.cpu_offload and unit.parts and is_capturing(unit.parts[0].device):
            raise StateError(
                f"flat_param.fully_shard: unit '{unit.name}' has an offload_policy and a graph is "
                "being captured, but gradients cannot be moved to the host during a capture. "
                "Capture without offload_policy, or run this module outside of the capture."
            )
        if unit.looked_at != registrations.count and not self.depth:
            look_for_strays(unit, self.units)
        self.settle()
        if self.current.backward is not None:
            unit.begin(in_backward=True)
        else:
            forward = self.current.forward or self._begin_forward()
            begun = UnitForward(weakref.ref(unit))
            around = self.current.around[unit]
            around.update(forward.units, forward.incomplete)
            around.discard(unit)  # a module that calls itself
            forward.units.append(unit)
            forward.begun.append(begun)
            forward.order.append(unit)
            unit.begin()
            begun.versions = list(map(version_of, unit.gathered_leaves))
            self._prefetch_forward(forward, unit)
            if torch.is_grad_enabled():
                self._hook_inputs(unit, begun, (args, kwargs, unit.ignored))
        policy = options.precision
        if policy.cast_forward_inputs and policy.param_dtype is not None:
            return cast_floats(args, policy.param_dtype), cast_floats(kwargs, policy.param_dtype)
        return args, kwargs

    def _begin_forward(self) -> ForwardPass:
        """Begin an outermost forward."""
        if self.current.is_spent:
            for inputs in self.current.inputs.values():
                for _, handle in inputs.known.values():
                    handle.remove()
            self.current = Pass()
        elif self.current.chain:
            # A backward may have been stopped before its pass was recorded here.
            for each in self.units:
                each.drop_leaf_grads()
        offloaded = [each for each in self.units if each.options.cpu_offload]
        for device in {part.device for each in offloaded for part in each.parts}:
            if device.type != "cpu":
                wait_in(device, "copy")  # shards may be written to by work before the pass
        self.current.forward = forward = ForwardPass()
        return forward

    def _prefetch_forward(self, forward: ForwardPass, unit: Unit) -> None:
        here, last = len(forward.order) - 1, self._last_order
        following: Sequence[Unit] = ()
        if unit.forward_prefetch:
            following = [each for each in unit.forward_prefetch if each not in forward.order]
        elif here < len(last) and last[here] is unit:
            following = last[here + 1 : here + 2]
        for each in following:
            if each.prefetch():
                forward.ahead.append(each)

    def _hook_inputs(self, unit: Unit, begun: UnitForward, values: Any) -> None:
        """Have `_on_input_grad` called at the gradient of each input, once."""
        found = self.current.inputs.get(unit)
        if found is None:
            found = self.current.inputs[unit] = UnitInputs(UnitForward(begun.unit))
        found.forwards = [each for each in found.forwards if each() is not None]
        found.forwards.append(weakref.ref(begun))
        hooked: set[int] = set()
        for tensor in tensors_in(values):
            if not tensor.requires_grad or id(tensor) in hooked:
                continue
            hooked.add(id(tensor))
            if not tensor.is_leaf:
                tensor.register_hook(partial(_on_input_grad, begun))
                begun.inputs += 1
                continue
            known = found.known.get(id(tensor))
            if known is None or known[0]() is not tensor:
                handle = tensor.register_hook(partial(_on_input_grad, found.leaves))
                found.known[id(tensor)] = weakref.ref(tensor), handle
                found.leaves.inputs += 1

    def _post_forward(self, unit: Unit, module: nn.Module, output: Any) -> Any:
        """Hook the outputs of a unit, reshard it unless backward begins here, cast the outputs."""
        returns = keeps = False
        forward = None if self.current.backward is not None else self.current.forward
        if torch.is_grad_enabled():
            tensors = tensors_in(output)
            begun = [] if self.current.forward is None else self.current.forward.begun[-1:]
            # A graph may be the only reference to the schedule, and keeps its `UnitForward`.
            told = partial(self._on_output_grad, unit, *begun)
            returns = _hook_nodes(tensors, told) or not tensors
            keeps = returns and (self.depth == 1 or not tensors or not unit.frees_after_forward)
        if forward is not None:
            self._leave(forward, unit, module, returns=returns, keeps=keeps)
        dtype = unit.options.precision.output_dtype
        return output if dtype is None else cast_floats(output, dtype)

    def _leave(
        self, forward: ForwardPass, unit: Unit, module: nn.Module, *, returns: bool, keeps: bool
    ) -> None:
        """Record that a unit's forward has ended.

        A unit of several modules stays unsharded until all were called.
        """
        versions = forward.begun[-1].versions
        if list(map(version_of, unit.gathered_leaves)) != versions:
            raise unit.was_written(versions)
        forward.units.pop()
        forward.begun.pop()
        chain = self.current.chain
        if returns:
            chain.pop(unit, None)
            chain[unit] = not keeps
        if unit in forward.units:
            return  # a method of its module runs around this call, and needs the unit
        if unit.module_count > 1:
            called = forward.incomplete.setdefault(unit, set())
            called.add(id(module))
            if len(called) == unit.module_count:
                del forward.incomplete[unit]
        if keeps or unit in forward.incomplete:
            unit.swap_out()
            if unit in chain:
                chain[unit] = False
        else:
            unit.reshard()
            if unit in chain:
                chain[unit] = True
        if forward.units:
            return
        for each in {*self._last_order, *forward.ahead} - set(forward.order):
            if not each.is_by_hand:
                each.reshard()  # prefetched, and not used this time
        for each in forward.incomplete:
            each.reshard()
            self.was_freed(each)
        self._last_order = forward.order
        self.current.forward = None

    def stop(self, depth: int) -> None:
        """Handle an exception that leaves a forward begun at `depth`. Not a collective.

        In backward the forward is a recomputation, which an early stop ends by an exception; the
        pass continues.
        """
        forward = self.current.forward
        if forward is None or self.current.backward is not None:
            return
        left = forward.units[depth:]
        del forward.units[depth:], forward.begun[depth:]
        if forward.units:  # the module around it may catch the exception
            for unit in left:
                if unit not in forward.units:
                    unit.reshard()
        else:
            self._drop_forward()

    def _drop_forward(self) -> None:
        for unit in self.units:
            unit.reshard()
        self.current.chain = dict.fromkeys(self.current.chain, True)
        self.current.forward = None

    # Backward.

    def _on_output_grad(self, unit: Unit, *_: object) -> None:
        """Pre-backward: unshard all units up to this one, and gather the next ones. Collective."""
        state, current = self._standing(unit), self.current.backward
        if state.begun or state.freed:
            return
        assert current is not None
        state.begun = True
        if unit.unshards_in_backward:
            places = current.places
            if places.get(unit, -1) >= current.gathered:
                self._gather_until(current, places[unit] + 1)
                unit.unshard()
            stop = current.gathered + 1
            if unit.backward_prefetch:
                stop = max(places.get(each, -1) + 1 for each in unit.backward_prefetch)
            self._gather_until(current, stop)
            unit.begin(in_backward=True)
        else:
            unit.set_leaves()
        self._advance(unit, state)

    def _gather_until(self, current: BackwardPass, stop: int) -> None:
        """Begin to gather the first `stop` units of a backward. Collective."""
        for unit in current.to_gather[current.gathered : stop]:
            current.gathered += 1
            unit.start_gather(in_backward=True)

    def on_input_grad(self, unit: Unit, forward: UnitForward) -> None:
        """Handle the gradient of an input or of an ignored parameter.

        It may be the gradient of another loss, so it starts no backward pass.
        """
        current = self.current.backward
        if current is None or current.failed or current.callback() is None:
            return
        if (state := current.units.get(unit)) is not None:
            state.inputs_arrived[forward] = state.inputs_arrived.get(forward, 0) + 1
            self._advance(unit, state)

    def on_grad(self, unit: Unit, part: ShardedSegment, index: int) -> None:
        """Handle the gradient of a leaf."""
        current, state = self.current.backward, None
        if current is not None and not current.failed and current.callback() is not None:
            state = current.units.get(unit)
        state = state or self._standing(unit)
        if state.summed:
            where = f"unit {unit.name!r}" if unit.name else "the outermost unit"
            raise StateError(
                f"flat_param.fully_shard: {where} has another gradient, of a backward inside the "
                "one that runs, but its gradients are summed already. Call that backward before "
                "or after this one, and checkpoint with use_reentrant=False."
            )
        part.take(index, self.pool)
        state.arrived += 1
        if state.arrived == state.expected:
            for outer in self.current.around[unit]:
                around = self._standing(outer)
                around.inner -= 1
                self._advance(outer, around)
        self._advance(unit, state)

    def _advance(self, unit: Unit, state: UnitBackward) -> None:
        """Reduce and reshard a unit as soon as the docstring of the file allows it."""
        if not state.begun or state.arrived < state.expected or state.freed:
            return
        current = self.current.backward
        assert current is not None
        is_ready = unit in current.ready
        if is_ready and state.inner:
            return
        inputs = missing = 0
        if (found := self.current.inputs.get(unit)) is not None:
            inputs = found.leaves.inputs
            missing = inputs - state.inputs_arrived.get(found.leaves, 0)
            for alive in found.forwards:
                if (forward := alive()) is not None:
                    inputs += forward.inputs
                    missing += forward.inputs - state.inputs_arrived.get(forward, 0)
        if not is_ready and (state.expected == len(unit.nodes) or (inputs and missing <= 0)):
            current.ready.add(unit)
            while current.to_reduce and current.to_reduce[0] in current.ready:
                self._reduce(current, current.to_reduce.pop(0))
        if state.inner or missing > 0 or not (inputs or state.expected == unit.leaf_count):
            return
        state.freed = True
        self._release(unit)

    def _standing(self, unit: Unit) -> UnitBackward:
        """The state of a unit in the running pass; the first gradient starts a new pass."""
        current = self.current.backward or self._begin_backward()
        if current.failed or current.callback() is None:
            # Of older gradients, a loop over the module's parameters may have cleared the leaves'.
            parts = [part for each in self.units for part in each.parts]
            if any(param.grad is not None for part in parts for param in part.params):
                raise StateError(
                    "flat_param.fully_shard: an exception stopped the last backward, and another "
                    "one was called without a forward while older gradients are there. Run the "
                    "forward again, or call zero_grad() of the module."
                )
            self.abandon()
            return self._standing(unit)
        state = current.units.get(unit)
        if state is None:  # its forward had no output that leads back into it
            state = current.units[unit] = UnitBackward(sum(map(will_run, unit.nodes)))
            if current.sync:
                current.to_reduce.append(unit)
            else:
                self._accumulated[unit] = None
        return state

    def _begin_backward(self) -> BackwardPass:
        sync = self._syncs()
        callback = partial(self._end_backward)
        at_end_of_backward(callback)
        chain = self.current.chain
        order = list(reversed(chain))
        trained = [unit for unit in self._inner_first(order) if unit.trained]
        late = [unit for unit in self._accumulated if unit not in chain]
        to_gather: dict[Unit, None] = {}
        for unit in order:
            to_gather |= dict.fromkeys((unit, *unit.backward_prefetch))
        units = {unit: UnitBackward(sum(map(will_run, unit.nodes))) for unit in chain}
        for unit, state in units.items():
            for outer in self.current.around[unit] if state.expected else ():
                if outer in units:
                    units[outer].inner += 1
        if not sync:
            self._accumulated |= dict.fromkeys(trained)
        freed = [each for each in to_gather if chain.get(each) and each.unshards_in_backward]
        self.current.is_spent = True
        self.current.backward = backward = BackwardPass(
            sync=sync,
            callback=weakref.ref(callback, partial(_on_end, weakref.ref(self))),
            to_gather=freed,
            places={unit: place for place, unit in enumerate(freed)},
            to_reduce=[*trained, *late] if sync else [],
            units=units,
            is_differentiated=torch.is_grad_enabled(),
        )
        return backward

    def _syncs(self) -> bool:
        """Whether a backward that begins reduces gradients."""
        found = {unit.syncs for unit in self.units}
        if len(found) > 1:
            raise StateError(
                "flat_param.set_requires_gradient_sync: some units of a module reduce their "
                "gradients and others do not, but the units of a tree reduce together. Call it on "
                "the outermost module, with recurse."
            )
        return self.sync and all(found)

    def reduce_accumulated(self) -> None:
        """Reduce the gradients that backwards without reductions have left. Collective."""
        self.settle()
        if not self._syncs():
            return
        callback = partial(self._end_backward)
        self.current.backward = BackwardPass(
            sync=True,
            callback=weakref.ref(callback),
            to_gather=[],
            places={},
            to_reduce=list(self._accumulated),
            units={},
            is_differentiated=False,
        )
        callback()

    def _reduce(self, current: BackwardPass, unit: Unit) -> None:
        self._advance_reductions(current)
        if unit in current.units:
            current.units[unit].summed = True
        for part in unit.trained:
            current.reducing.append((unit, part, part.start_reduce(self.pool)))
        current.reduced.append(unit)
        if all(pending.work is None for _, _, pending in current.reducing):
            self._advance_reductions(current)

    def _advance_reductions(self, current: BackwardPass) -> None:
        """Finish reductions over replicas, and begin those of the unit before. Collective."""
        for unit, part, pending in current.summing:
            pending.wait()
            part.finish_sum(unit)
        current.summing = []
        for unit, part, pending in current.reducing:
            pending.wait()
            following = part.start_sum(unit, self.pool)
            if following is not None:
                current.summing.append((unit, part, following))
        current.reducing = []

    def _release(self, unit: Unit) -> None:
        """Post-backward: reshard a unit whose parameters are no longer read."""
        frees = unit.frees_after_backward
        if frees is None:
            current = self.current.backward
            assert current is not None
            frees = current.sync or unit.frees_after_forward
            frees = frees and not current.is_differentiated
        if frees:
            unit.reshard()
        else:
            if unit.is_by_hand:
                unit.end_show()
            unit.swap_out()

    def _end_backward(self) -> None:
        current = self.current.backward
        if current is None:
            return
        current.ending = True
        try:
            for skipped in current.to_gather[current.gathered :]:
                skipped.unshard()
                skipped.reshard()
            while current.to_reduce:
                self._reduce(current, current.to_reduce.pop(0))
            kept = [
                unit
                for unit in current.reduced
                if not unit.sums_copies and unit.comms.replicate.group is not None
            ]
            agreements = agree(unit for unit in current.reduced if unit not in kept)
            for _ in range(2):
                self._advance_reductions(current)
            for unit, state in current.units.items():
                if not state.freed or unit.is_unsharded:
                    self._release(unit)
            for each in agreements:
                each.assign_grads()
            if current.sync:
                self._accumulated = dict.fromkeys(kept)
        except BaseException:
            current.failed = True  # the next call drops all gradients
            raise
        self.current.backward = None

    def drop_accumulated(self) -> None:
        """Drop gradients that were accumulated and not reduced. Not a collective."""
        self.settle()
        if self.current.backward is None and self._accumulated:
            for unit in self._accumulated:
                unit.forget()
            self._accumulated = {}

    def abandon(self) -> None:
        """Drop all state of a stopped backward. Not a collective.

        If it is interrupted, the next call repeats it: the pass is dropped last.
        """
        for unit in self.units:
            unit.forget()
        self._accumulated = {}
        self.current.chain = dict.fromkeys(self.current.chain, True)
        self._last_order = []  # ranks that disagreed about it would prefetch other units again
        self.current.backward = None

    def _inner_first(self, order: list[Unit]) -> list[Unit]:
        """Units in the order in which backward completes their gradients.

        A unit that begins in forward with an embedding, and ends with a head, gets its last
        gradient after all units inside it. `order` has it before them.
        """
        found: list[Unit] = []
        begun: list[Unit] = []
        for unit in order:
            while begun and begun[-1] not in self.current.around[unit]:
                found.append(begun.pop())
            begun.append(unit)
        return found + begun[::-1]


def _hook_nodes(tensors: Iterable[Tensor], told: Callable[[object], None]) -> bool:
    """Place a hook on the autograd nodes of tensors; return whether there was a node.

    An in-place operation on a view replaces the view's node, but not its base's.
    """
    is_hooked = False
    for node, tensor in ((tensor.grad_fn, tensor) for tensor in tensors):
        if node is None:
            continue
        is_hooked = True
        node.register_prehook(told)
        for behind, _ in node.next_functions if is_view(tensor) else ():
            if behind is not None:
                behind.register_prehook(told)
    return is_hooked


def _on_input_grad(forward: UnitForward, *_: object) -> None:
    unit = forward.unit()
    if unit is not None:
        schedule = unit.schedule_ref() or unit.schedule  # which raises
        schedule.on_input_grad(unit, forward)


def on_grad(part_ref: weakref.ref[ShardedSegment], index: int, leaf: Tensor) -> None:
    """Handle the gradient of a leaf; its unit may be deleted."""
    part = part_ref()
    unit = None if part is None else part.unit()
    if part is None or unit is None:
        return
    if part.leaves[index] is not leaf:
        leaf.grad = None
        raise StateError(
            "flat_param.fully_shard: this backward belongs to a forward before .to() or an "
            "interrupted step, but full parameters have had other memory since then. Run the "
            "forward again."
        )
    schedule = unit.schedule_ref() or unit.schedule  # which raises
    schedule.on_grad(unit, part, index)


def _on_end(schedule_ref: weakref.ref[Schedule], callback: weakref.ref[Callable[[], None]]) -> None:
    """Handle the end of a backward. If its pass is incomplete, restore the optimizer's parameters.

    `settle` does the remaining work later, since it may raise. The running pass may belong to
    another backward.
    """
    schedule = schedule_ref()
    current = None if schedule is None else schedule.current.backward
    if schedule is not None and current is not None and current.callback is callback:
        current.failed = True
        for unit in schedule.units:
            unit.swap_out()


@cache
def _uncompiled_ends() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Pre- and post-forward as functions of the schedule.

    Compiled code calls them without tracing them, since they change hooks and storages at every
    call.
    """
    disable = torch.compiler.disable
    return disable(Schedule._pre_forward), disable(Schedule._post_forward)
