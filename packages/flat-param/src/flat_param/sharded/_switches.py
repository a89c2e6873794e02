"""Checks for the setters of `ShardedModule`."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

from torch import Tensor

from .._errors import StateError
from ..comm._groups import comm_of_part
from ._unit import Unit


def checked_choice(value: object, function: str) -> bool:
    """The value, if it is True or False.

    Raises:
        StateError: it is not a bool, 0 or 1.
    """
    is_one = isinstance(value, Hashable) and not isinstance(value, Tensor)
    if not is_one or value not in (True, False):
        raise StateError(
            f"flat_param.{function}: it is told {value!r}, but every rank must be told alike "
            "whether or not. Pass True or False."
        )
    return bool(value)


def check_tree(unit: Unit, *, recurse: bool) -> None:
    """Refuse to change a setting of the whole tree for a single unit.

    Raises:
        StateError: the unit is not the outermost, or `recurse` is False.
    """
    if unit.name or not recurse:
        where = f"unit '{unit.name}' alone" if unit.name else "the outermost unit alone"
        raise StateError(
            f"flat_param.set_requires_gradient_sync: called for {where}, but the units of a "
            "tree sum their gradients together. Call it on the outermost module, with recurse."
        )


def free_after_forward(units: Sequence[Unit], how: bool | int) -> None:
    """Set `reshard_after_forward` of units. The first call with a number is a collective.

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


def check_group_size(how: bool | int, world_size: int, *, name: str = "a unit") -> None:
    """Refuse a number of ranks that does not divide `world_size`.

    Raises:
        StateError: see `ShardedModule.set_reshard_after_forward`.
    """
    if not isinstance(how, int):
        raise StateError(
            f"flat_param.set_reshard_after_forward: {name} is told {how!r}, but it is freed after "
            "forward, or a number of ranks keep it whole. Pass True, False, or how many."
        )
    if type(how) is int and (how < 1 or world_size % how):
        raise StateError(
            f"flat_param.set_reshard_after_forward: {how} ranks are to keep {name}, but it is "
            f"divided over {world_size}, which is not a multiple. Pass a divisor, True or False."
        )


def listed_units(unit: Unit, modules: object, function: str) -> tuple[Unit, ...]:
    """The units of modules that are gathered while `unit` computes.

    Raises:
        StateError: see `ShardedModule.set_modules_to_forward_prefetch`.
    """
    is_unit = isinstance(getattr(modules, "_flat_param", None), Unit)
    if is_unit or not isinstance(modules, Iterable):
        raise StateError(
            f"flat_param.{function}: modules is one {type(modules).__name__}, but it must be a "
            "list of sharded modules. Pass a list, such as [module]; an empty one for the default."
        )
    modules = tuple(modules)
    others = [getattr(module, "_flat_param", None) for module in modules]
    units = tuple(other for other in others if isinstance(other, Unit) and other is not unit)
    if len(units) < len(modules) or any(each.schedule is not unit.schedule for each in units):
        raise StateError(
            f"flat_param.{function}: modules has {[type(module).__name__ for module in modules]}, "
            "but a list has other units of the same tree. Call fully_shard on each, and on a "
            "module around them."
        )
    return units
