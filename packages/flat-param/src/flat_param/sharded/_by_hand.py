"""Units that are gathered and freed when their user says so.

Rule 1: what is gathered by hand is shown, outside of forward and backward too, until it is freed or
        the unit's next forward or backward has used it up.
Rule 2: whatever reads shards or shows pieces begins with `units_at_rest`, which frees such units
        and takes in what was put in place of parameters.
Rule 3: a gather that is stopped leaves the unit freed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from torch import nn

from .._errors import StateError
from ._half_sharded import HalfShardedModule
from ._unit import Unit


class UnshardHandle:
    """A gather that `ShardedModule.unshard` has begun."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait = wait

    def wait(self) -> None:
        """Wait for the full parameters and show them. A second call does nothing.

        The same goes for a call after the forward, backward or `reshard()` that has freed them.
        """
        self._wait()


def _show(unit: Unit) -> None:
    """Show a unit whose gather was begun by hand and is not used up."""
    unit.schedule.settle()
    if unit.is_by_hand and not unit.sites.shows:
        try:
            unit.show()
        except BaseException:
            unit.reshard()
            raise


def begin_unshard(unit: Unit) -> UnshardHandle:
    """Begin to gather a unit for its user; one that computes is whole. Collective."""
    schedule = unit.schedule
    schedule.settle()
    if not schedule.computes(unit):
        try:
            if not unit.sites.shows:
                unit.take_changes()
            if unit.is_stale:
                unit.reshard()
            unit.start_gather()
            unit.is_by_hand = True
        except BaseException:
            unit.reshard()
            raise
    return UnshardHandle(partial(_show, unit))


def reshard(unit: Unit) -> None:
    """Free a unit for its user; a backward that comes to it will gather it. Not a collective.

    Raises:
        StateError: the pass that runs needs it whole.
    """
    schedule = unit.schedule
    schedule.settle()
    backward = schedule.backward
    state = None if backward is None else backward.units.get(unit)
    if schedule.computes(unit) or (state is not None and not state.freed):
        name = f"unit '{unit.name}'" if unit.name else "the outermost unit"
        phase = "forward" if backward is None else "backward"
        raise StateError(
            f"flat_param.reshard: {name} is in the {phase} that runs, but that computes with "
            "whole parameters and frees them itself. Call it after the pass."
        )
    unit.reshard()
    schedule.was_freed(unit)


def units_below(module: nn.Module) -> Iterator[Unit]:
    """The units of a module and of those inside it.

    Raises:
        StateError: one of them was left half sharded.
    """
    found: set[Unit] = set()
    for child in module.modules():
        if isinstance(child, HalfShardedModule):
            child.refuse()
        unit = getattr(child, "_flat_param", None)
        if isinstance(unit, Unit) and unit not in found:
            found.add(unit)
            yield unit


def units_at_rest(module: nn.Module) -> list[Unit]:
    """The same, each as `put_to_rest` leaves it (Rule 2). Not a collective.

    Raises:
        StateError: one was left half sharded, or is needed by the backward that runs.
        ParameterError: something of another shape was put in place of a parameter.
    """
    units = list(units_below(module))
    for unit in units:
        put_to_rest(unit)
    return units


def put_to_rest(unit: Unit) -> None:
    """Free a unit that was gathered by hand, and take in what was put there. Not a collective."""
    if unit.is_by_hand:
        reshard(unit)
    unit.take_changes()
