"""Units that are gathered and freed when their user says so.

Rule 1: what is gathered by hand is shown, outside of forward and backward too, until it is freed or
        the unit's next forward or backward has used it up. What was written to it meanwhile is in
        the shards then, see Note [Lent memory] in _sharded_params.py.
Rule 2: whatever reads shards or shows pieces begins with `units_at_rest`, which frees such units
        and takes in what was put in place of parameters.
Rule 3: a gather that is stopped leaves the unit freed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from torch import nn

from .._errors import StateError
from ..comm._groups import comm_of_part
from ._half_sharded import HalfShardedModule
from ._unit import Unit


class UnshardHandle:
    """A gather that `ShardedModule.unshard` has begun."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait = wait

    def wait(self) -> None:
        """Show whole parameters once they are there. A second call does nothing.

        Nor does one after the forward, backward or `reshard()` that has used them up.
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


def free_after_forward(units: Sequence[Unit], how: bool | int) -> None:
    """Say of units what `ShardedModule.set_reshard_after_forward` is told.

    Collective where `how` is a number, in its group, for the first time.

    Raises:
        StateError: the number does not divide the ranks that share a unit; nothing is changed.
    """
    for unit in units:
        name = f"unit '{unit.name}'" if unit.name else "the outermost unit"
        check_group_size(how, unit.comms.gather.world_size, name=name)
    size = None if isinstance(how, bool) else how
    for unit in units:
        unit.frees_after_forward = size != 1 and bool(how)
        is_smaller = size is not None and 1 < size < unit.comms.gather.world_size
        unit.regroup = comm_of_part(unit.comms, size) if size and is_smaller else None
        if unit.regroup is not None:
            unit.regroup.rename(unit.comms.gather.unit)


def check_group_size(how: bool | int | None, world_size: int, *, name: str = "a unit") -> None:
    """Refuse a number of ranks that leaves some of `world_size` over.

    Raises:
        StateError: see `ShardedModule.set_reshard_after_forward`.
    """
    if type(how) is int and (how < 1 or world_size % how):
        raise StateError(
            f"flat_param.set_reshard_after_forward: {how} ranks are to keep {name}, but it is "
            f"divided over {world_size}, which is no multiple. Pass a divisor, True or False."
        )


def listed_units(unit: Unit, modules: object, function: str) -> tuple[Unit, ...]:
    """The units of modules that are to be gathered while `unit` computes.

    Raises:
        StateError: see `ShardedModule.set_modules_to_forward_prefetch`.
    """
    if not isinstance(modules, (list, tuple)):
        raise StateError(
            f"flat_param.{function}: modules is one {type(modules).__name__}, but it is a list of "
            "sharded modules. Put the module into a list."
        )
    for index, module in enumerate(modules):
        wrong = _wrong_to_list(unit, module)
        if wrong:
            raise StateError(
                f"flat_param.{function}: modules[{index}] is a {type(module).__name__} that "
                f"{wrong} first."
            )
    return tuple(module._flat_param for module in modules)


def _wrong_to_list(unit: Unit, module: object) -> str:
    """Why a module cannot be gathered while `unit` computes, or nothing."""
    other = getattr(module, "_flat_param", None)
    if not isinstance(other, Unit):
        return "is not sharded, but only units are gathered. Call fully_shard on it"
    if other is unit:
        return "is this unit itself, but a list has the units after it. Take it from the list"
    if other.schedule is not unit.schedule:
        return "is of another tree, but a list has units of this one. Shard the module around both"
    return ""


def divide_by(unit: Unit, factor: float | None) -> None:
    """Say of a unit what `ShardedModule.set_gradient_divide_factor` is told.

    Raises:
        StateError: it is no number above 0, or infinite.
    """
    is_number = isinstance(factor, (int, float)) and not isinstance(factor, bool)
    if factor is not None and not (is_number and 0 < factor < math.inf):
        raise StateError(
            f"flat_param.set_gradient_divide_factor: factor is {factor!r}, but sums of gradients "
            "are divided by it. Pass a finite number above 0, or None for the number of ranks."
        )
    unit.divide_factor = factor


def units_below(module: nn.Module) -> Iterator[Unit]:
    """The units of a module and of those inside it.

    Raises:
        StateError: one of them was left half sharded.
    """
    for child in module.modules():
        if isinstance(child, HalfShardedModule):
            child.refuse()
        unit = getattr(child, "_flat_param", None)
        if isinstance(unit, Unit):
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
