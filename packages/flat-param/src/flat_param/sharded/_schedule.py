"""The order in which the units of one tree unshard, reshard and reduce gradients.

- Units are unsharded for backward in the reverse of the order in which the forward pass left them,
  and gradients are reduced in the reverse of the order in which forward reached them, on every
  rank: an outer unit is needed before its inner units, and gets its last gradient after them. A
  unit that a rank's batch does not use is gathered and reduced on that rank too, as other ranks may
  need it.
- One reduction is in flight at a time. The previous one is finished and its memory freed before the
  next one starts.
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
from collections.abc import Callable
from functools import partial

import torch

from .._torch_compat import at_end_of_backward
from ..comm._comm import CommLog
from ._order import publish
from ._passes import BackwardPass, ForwardPass, UnitBackward, has_old_grad, inner_first
from ._prefetch import PrefetchLists
from ._unit_params import UnitParams

_Callback = weakref.ref[Callable[[], None]]


class Schedule:
    """The units of one tree, and the running pass; see _passes.py.

    Attributes:
        units: in the order in which they were sharded.
        log: counts of their collectives.
        sync: whether the next backward reduces gradients over ranks.
        lists: the prefetch lists.
        forward: the forward pass that runs.
        backward: the backward pass that runs, or was stopped.
    """

    def __init__(self) -> None:
        self.units: list[UnitParams] = []
        self.log = CommLog()
        self.sync = True
        self.lists: PrefetchLists = PrefetchLists()
        self.forward: ForwardPass | None = None
        self.backward: BackwardPass | None = None
        self._last_order: list[UnitParams] = []
        self._chain: dict[UnitParams, bool] = {}  # of the forwards since the last backward
        self._chain_is_spent = False
        self._accumulated: dict[UnitParams, None] = {}
        self._was_stopped = False

    def merge(self, other: Schedule) -> None:
        """Add the units of a nested tree."""
        if other is not self:
            for unit in other.units:
                unit.join(self)
                unit.comms.log.counts = self.log.counts
                self.units.append(unit)
            self.lists.merge(other.lists)

    @property
    def depth(self) -> int:
        """Number of nested running forwards."""
        return 0 if self.forward is None else len(self.forward.running)

    def computes(self, unit: UnitParams) -> bool:
        """Whether the unit's forward or backward is running, so that the module has the leaves."""
        if self.backward is not None:
            state = self.backward.units.get(unit)
            return state is not None and state.begun and not state.freed
        return self.forward is not None and unit in self.forward.running

    def was_freed(self, unit: UnitParams) -> None:
        """Record that a unit was resharded, so that backward gathers it again."""
        for chain in (self._chain, self._chain if self.forward is None else self.forward.chain):
            if unit in chain:
                chain[unit] = True

    def settle(self) -> None:
        """End a pass that an exception has stopped, if there is one. Not a collective."""
        if self.backward is not None and self.backward.was_stopped:
            self.abandon()
        if self.forward is not None and not self.forward.running:
            self._drop_forward()

    # Forward.

    def enter(self, unit: UnitParams) -> None:
        """Record that a unit's forward begins."""
        self.settle()
        if self.backward is not None:
            return
        if self.forward is None:
            self._clear_chain()
            self.forward = ForwardPass()
        unit.around.update(self.forward.running, self.forward.incomplete)
        unit.around.discard(unit)  # a module that calls itself
        self.forward.running.append(unit)
        self.forward.order.append(unit)
        unit.reshard_if_stale()

    def _clear_chain(self) -> None:
        self._was_stopped = False
        if self._chain_is_spent:
            self._chain, self._chain_is_spent = {}, False
            for unit in self.units:
                unit.forget_inputs()
        elif self._chain:
            # A backward may have been stopped before its pass was recorded here.
            for unit in self.units:
                unit.drop_leaf_grads()

    def prefetch_forward(self, unit: UnitParams) -> None:
        """Begin to gather the next units. Collective."""
        forward = self.forward
        if forward is None:
            return
        begun, last = forward.order, self._last_order
        for following in self.lists.in_forward(unit, begun=begun, last_order=last):
            if following.is_stale and not following.is_by_hand:
                following.reshard()
            if not following.is_gathered:
                forward.ahead.append(following)
                following.start_gather()

    def leave(self, unit: UnitParams, *, returns: bool, keeps: bool, module: object = None) -> None:
        """Record that a unit's forward has ended.

        Args:
            unit: the unit.
            returns: whether backward may reach the unit.
            keeps: whether the unit stays unsharded until backward.
            module: the called module; a unit of several modules stays unsharded until all were
                called.
        """
        forward = self.forward
        if self.backward is not None or forward is None:
            return
        forward.running.pop()
        if returns:
            forward.chain.pop(unit, None)
            forward.chain[unit] = not keeps
        if unit in forward.running:
            return  # a method of its module runs around this call, and needs the unit
        waits = unit.module_count > 1 and forward.waits(unit, module, unit.module_count)
        if keeps or waits:
            unit.sites.swap_out()
            if unit in forward.chain:
                forward.chain[unit] = False
        elif returns:
            unit.reshard_until_backward()
            forward.chain[unit] = True
        else:
            unit.reshard()
            if unit in forward.chain:
                forward.chain[unit] = True
        if not forward.running:
            self._end_forward(forward)

    def stop(self, depth: int) -> None:
        """Handle an exception that leaves a forward begun at `depth`. Not a collective.

        In backward the forward is a recomputation, which an early stop ends by an exception; the
        pass continues.
        """
        forward = self.forward
        if forward is None or self.backward is not None:
            return
        left = forward.running[depth:]
        del forward.running[depth:]
        if forward.running:  # the module around it may catch the exception
            for unit in left:
                if unit not in forward.running:
                    unit.reshard()
        else:
            self._drop_forward()

    def _drop_forward(self) -> None:
        for unit in self.units:
            unit.reshard()
        self._chain = dict.fromkeys(self._chain, True)
        self.forward = None

    def _end_forward(self, forward: ForwardPass) -> None:
        for unit in {*self._last_order, *forward.ahead} - set(forward.order):
            if not unit.is_by_hand:
                unit.reshard()  # prefetched, and not used this time
        for unit in forward.incomplete:
            if unit in forward.chain:
                unit.reshard_until_backward()
                forward.chain[unit] = True
            else:
                unit.reshard()
        self._last_order = forward.order
        self._chain = self._both_chains(forward)
        self.forward = None

    def _both_chains(self, forward: ForwardPass | None) -> dict[UnitParams, bool]:
        if forward is None or not self._chain:
            return self._chain if forward is None else forward.chain
        before = {unit: freed for unit, freed in self._chain.items() if unit not in forward.chain}
        return before | forward.chain

    # Backward.

    def begin_backward(self) -> BackwardPass:
        """Return the running pass; the first gradient starts a new one."""
        current = self.backward
        if current is not None:
            if not current.was_dropped:
                return current
            self.abandon()
            self._was_stopped = True
        if self._was_stopped:
            self._refuse_old_grads()
        callback = partial(self._end_backward)
        at_end_of_backward(callback)
        chain = self._both_chains(self.forward)
        order = list(reversed(chain))
        trained = [unit for unit in inner_first(order, lambda unit: unit.around) if unit.grads]
        late = [unit for unit in self._accumulated if unit not in chain]
        current = BackwardPass(
            sync=self.sync,
            callback=weakref.ref(callback, partial(_on_end, weakref.ref(self))),
            to_gather=[unit for unit in self.lists.backward_order(order) if chain.get(unit)],
            to_reduce=[*trained, *late] if self.sync else [],
            units={unit: UnitBackward(unit.count_expected()) for unit in chain},
            is_differentiated=torch.is_grad_enabled(),
        )
        for unit, state in current.units.items():
            if state.expected:
                for outer in unit.around & current.units.keys():
                    current.units[outer].inner += 1
        if not self.sync:
            self._accumulated |= dict.fromkeys(trained)
        self._chain_is_spent = True
        self.backward = current
        return current

    def _refuse_old_grads(self) -> None:
        """Refuse to add to gradients in a second backward of a forward, after a stopped one.

        Until a device's engine has dropped the stopped backward, the module has its leaves. A
        user's loop that clears gradients of module parameters then misses those of the optimizer's
        parameters.
        """
        for unit in self.units:
            for part in unit.parts:
                for param, piece in zip(part.params, part.param_pieces, strict=True):
                    if param.grad is not None:
                        raise has_old_grad(unit.name, piece.name)

    def standing(self, unit: UnitParams) -> UnitBackward:
        """The state of a unit in the running pass."""
        current = self.backward
        if current is None or current.was_dropped:
            current = self.begin_backward()
        state = current.units.get(unit)
        if state is None:  # its forward had no output that leads back into it
            state = current.units[unit] = UnitBackward(unit.count_expected())
            if current.sync:
                current.to_reduce.append(unit)
            else:
                self._accumulated[unit] = None
        return state

    def gather_for_backward(self, unit: UnitParams) -> None:
        """Begin to gather all units up to this one, and the next ones. Collective."""
        assert self.backward is not None
        queue = self.backward.to_gather
        if unit in queue:
            for _ in range(queue.index(unit) + 1):
                queue.pop(0).start_gather()
            unit.unshard()
        for _ in range(min(self.lists.in_backward(unit, queue), len(queue))):
            queue.pop(0).start_gather()

    def on_grads(self, unit: UnitParams) -> None:
        """Handle that a unit has all its gradients: reduce the next units in order. Collective."""
        current = self.backward
        assert current is not None
        current.ready.add(unit)
        while current.to_reduce and current.to_reduce[0] in current.ready:
            self._reduce(current, current.to_reduce.pop(0))

    def _reduce(self, current: BackwardPass, unit: UnitParams) -> None:
        self._finish_reducing(current)
        if unit in current.units:
            current.units[unit].summed = True
        for grads in unit.grads:
            current.reducing.append(grads.start_reduce(unit.reduction))
        current.reduced.append(unit)

    def _finish_reducing(self, current: BackwardPass) -> None:
        for pending in current.reducing:
            pending.wait()
        current.reducing = []

    def release(self, unit: UnitParams) -> None:
        """Post-backward: reshard a unit whose parameters are no longer read."""
        frees = unit.frees_after_backward
        if frees is None:
            current = self.backward
            assert current is not None
            frees = current.sync or unit.frees_after_forward
            frees = frees and not current.is_differentiated
        if frees:
            unit.reshard()
        else:
            unit.end_show()
            unit.sites.swap_out()

    def _end_backward(self) -> None:
        current = self.backward
        if current is None:
            return
        current.ending = True
        try:
            self._finish_queues(current)
            if current.sync:
                self._publish(current.reduced)
        except BaseException:
            current.failed = True  # the next call drops all gradients
            raise
        self.backward = None

    def _publish(self, reduced: list[UnitParams]) -> None:
        kept = [unit for unit in reduced if any(each.kept is not None for each in unit.grads)]
        publish([unit for unit in reduced if unit not in kept])
        self._accumulated = dict.fromkeys(kept)

    def _finish_queues(self, current: BackwardPass) -> None:
        while current.to_gather:
            skipped = current.to_gather.pop(0)
            skipped.unshard()
            skipped.reshard()
        while current.to_reduce:
            self._reduce(current, current.to_reduce.pop(0))
        self._finish_reducing(current)
        for unit, state in current.units.items():
            if not state.freed or unit.is_unsharded:
                self.release(unit)

    def drop_accumulated(self) -> None:
        """Drop gradients that were accumulated and not reduced. Not a collective."""
        self.settle()
        if self.backward is None and self._accumulated:
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
        self._chain = dict.fromkeys(self._chain, True)
        self._last_order = []  # ranks that disagreed about it would prefetch other units again
        self.backward = None


def _on_end(schedule_ref: weakref.ref[Schedule], callback: _Callback) -> None:
    """Handle the end of a backward. If its pass is incomplete, restore the optimizer's parameters.

    `settle` does the remaining work later, since it may raise. The running pass may belong to
    another backward.
    """
    schedule = schedule_ref()
    current = None if schedule is None else schedule.backward
    if schedule is not None and current is not None and current.callback is callback:
        current.failed = True
        for unit in schedule.units:
            unit.sites.swap_out()
