"""Edge: the order in which the units of one tree gather, free, and sum gradients.

Rule 1: units are gathered for backward, and gradients summed, in the reverse of the order in which
        the forward pass met them, on every rank. A unit that a rank's batch leaves out is gathered
        and summed there all the same: the other ranks may need it.
Rule 2: one sum is under way at a time; the one before it is finished first, and its memory freed.
Rule 3: `.grad` appears at the end of backward, and only for parameters that some rank used.
Rule 4: while gradients are accumulated (`sync` is False) nothing is summed.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from ._comm import CommLog, Pending
from ._torch_compat import at_end_of_backward, backward_is_running
from ._unit import BackwardState, Unit


class Schedule:
    """What the units of one tree share.

    Attributes:
        units: in the order in which they were sharded.
        depth: how many units' forwards are running, one within the other.
        in_backward: whether a backward pass through the tree runs.
        sync: whether the next backward sums gradients over ranks (Rule 4).
    """

    def __init__(self) -> None:
        self.units: list[Unit] = []
        self.log = CommLog()
        self.depth = 0
        self.in_backward = False
        self.sync = True
        self._order: list[Unit] = []
        self._last_order: list[Unit] = []
        self._chain: dict[Unit, bool] = {}  # forwarded with grad, in order; value: was freed
        self._chain_is_spent = False
        self._accumulated: dict[Unit, None] = {}
        self._to_gather: list[Unit] = []
        self._to_reduce: list[Unit] = []
        self._ready: set[Unit] = set()
        self._reducing: list[Pending] = []
        self._reduced: list[Unit] = []

    def merge(self, other: Schedule) -> None:
        """Take over the units of a nested tree."""
        if other is not self:
            for unit in other.units:
                unit.schedule = self
                unit.lanes.log.counts = self.log.counts
                self.units.append(unit)

    # Forward.

    def enter(self, unit: Unit) -> None:
        """A unit's forward begins."""
        if self.in_backward and not backward_is_running():
            self.abandon()
        if self.depth == 0 and not self.in_backward:
            self._begin_forward()
        self.depth += 1
        if not self.in_backward:
            self._order.append(unit)
            unit.reshard_if_stale()

    def _begin_forward(self) -> None:
        self._order = []
        if self._chain_is_spent:
            self._chain, self._chain_is_spent = {}, False
            for unit in self.units:
                unit.forget_inputs()

    def prefetch_forward(self, unit: Unit) -> None:
        """Begin to gather the unit that came next the last time. Collective."""
        here = len(self._order) - 1
        if self.in_backward or not unit.options.forward_prefetch:
            return
        if here + 1 < len(self._last_order) and self._last_order[here] is unit:
            following = self._last_order[here + 1]
            following.reshard_if_stale()
            following.start_gather()

    def leave(self, unit: Unit, *, returns: bool, keeps: bool) -> None:
        """A unit's forward is over.

        Args:
            unit: which one.
            returns: whether backward may come back to it.
            keeps: whether its parameters stay whole until then.
        """
        self.depth -= 1
        if self.in_backward:
            return
        if returns:
            self._chain.pop(unit, None)
            self._chain[unit] = not keeps
        if keeps:
            unit.slots.swap_out()
        else:
            unit.reshard()
        if self.depth == 0:
            self._end_forward()

    def stop(self) -> None:
        """A unit's forward has raised. A recomputation may do so to end early, and goes on."""
        if self.in_backward:
            self.depth -= 1
        else:
            self.abandon()

    def _end_forward(self) -> None:
        for unit in set(self._last_order) - set(self._order):
            unit.reshard()  # gathered ahead, and not used this time
        self._last_order = self._order

    # Backward.

    def begin_backward(self) -> None:
        """Set up both queues at the first gradient of a backward pass (Rule 1)."""
        if self.in_backward:
            return
        at_end_of_backward(self._end_backward)
        self.in_backward = True
        self._chain_is_spent = True
        backward_order = list(reversed(self._chain))
        self._to_gather = [unit for unit in backward_order if self._chain[unit]]
        trained = [unit for unit in backward_order if unit.grads]
        if self.sync:
            self._to_reduce = [*trained, *(u for u in self._accumulated if u not in self._chain)]
        else:
            self._accumulated.update(dict.fromkeys(trained))

    def gather_for_backward(self, unit: Unit) -> None:
        """Begin to gather all units up to this one, and the one after it. Collective."""
        if unit in self._to_gather:
            for _ in range(self._to_gather.index(unit) + 1):
                self._to_gather.pop(0).start_gather()
            unit.unshard()
        if unit.options.backward_prefetch and self._to_gather:
            self._to_gather.pop(0).start_gather()

    def on_grads(self, unit: Unit) -> None:
        """A unit has all its gradients; sum whatever is next in order. Collective."""
        self._ready.add(unit)
        while self._to_reduce and self._to_reduce[0] in self._ready:
            self._reduce(self._to_reduce.pop(0))

    def _reduce(self, unit: Unit) -> None:
        self._finish_reducing()  # Rule 2
        self._reducing = [grads.start_reduce() for grads in unit.grads]
        self._reduced.append(unit)

    def _finish_reducing(self) -> None:
        for pending in self._reducing:
            pending.wait()
        self._reducing = []

    def release(self, unit: Unit) -> None:
        """Nothing of a unit's backward is left; free its whole parameters."""
        if self.sync or unit.options.strategy.frees_after_forward:
            unit.reshard()
        else:
            unit.slots.swap_out()

    def _end_backward(self) -> None:
        try:
            self._finish_queues()
            if self.sync:
                self._publish()
                self._accumulated = {}
        finally:
            self._reset()

    def _finish_queues(self) -> None:
        while self._to_gather:
            skipped = self._to_gather.pop(0)
            skipped.unshard()
            skipped.reshard()
        while self._to_reduce:
            self._reduce(self._to_reduce.pop(0))
        self._finish_reducing()
        for unit in self._chain:
            self.release(unit)

    def _publish(self) -> None:
        groups: dict[tuple[object, object], list[Unit]] = {}
        for unit in self._reduced:
            key = (unit.lanes.reduce.group, unit.lanes.replicate.group)
            groups.setdefault(key, []).append(unit)
        for units in groups.values():
            _publish_together(units)

    def _reset(self) -> None:
        self.in_backward = False
        self._to_gather, self._to_reduce, self._reducing, self._reduced = [], [], [], []
        self._ready = set()
        for unit in self.units:
            unit.backward = BackwardState()

    def abandon(self) -> None:
        """Forget a step that failed, so that the next one starts afresh. Not a collective."""
        self.depth = 0
        self._chain, self._accumulated = {}, {}
        for unit in self.units:
            unit.forget()
        self._reset()


def _publish_together(units: list[Unit]) -> None:
    """Agree on which parameters were used anywhere, then hand out gradients. Collective."""
    all_grads = [grads for unit in units for grads in unit.grads]
    used = [flag for grads in all_grads for flag in grads.used]
    agreed = _any_rank(used, units[0])
    for grads in all_grads:
        mine, agreed = agreed[: len(grads.used)], agreed[len(grads.used) :]
        grads.publish(mine)


def _any_rank(used: list[bool], unit: Unit) -> list[bool]:
    lanes = unit.lanes
    if lanes.world_size == 1:
        return used
    flags = torch.tensor(used, dtype=torch.uint8, device=unit.parts[0].device)
    lanes.reduce.all_reduce(flags, dist.ReduceOp.MAX).wait()
    lanes.replicate.all_reduce(flags, dist.ReduceOp.MAX).wait()
    # Reading the flags would make the host wait for the device; all True needs no reading.
    return used if all(used) else [bool(flag) for flag in flags.tolist()]
