"""`unshard()`, `reshard()` and `whole_params()` of units, called by the user.

The unsharded parameters are shown until `reshard()`, or until the unit's next forward or backward
is over. Code that reads shards first calls `units_at_rest`, which reshards such units. An
interrupted gather leaves the unit resharded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from ..._errors import StateError
from ...buffers._views import param_views
from ..tensor._param_piece import mark_shown
from ._segment import ShardedSegment
from ._unit import Unit

STOPPED = object()
"""Placeholder for the unit of a module while `fully_shard` makes it."""


class UnshardHandle:
    """A gather that `ShardedModule.unshard` has started."""

    def __init__(self, show: Callable[[], None]) -> None:
        self._show = show

    def wait(self) -> None:
        """Wait for the unsharded parameters and show them.

        Does nothing in a second call, or after a forward, backward or `reshard()` freed them.
        """
        self._show()


def _show(unit: Unit) -> None:
    """Show a unit whose gather was begun, if nothing has freed it since."""
    unit.schedule.settle()
    if unit.is_by_hand and not unit.is_shown:
        try:
            unit.show()
        except BaseException:
            unit.reshard()
            raise


def begin_unshard(unit: Unit) -> UnshardHandle:
    """Start to gather a unit, unless it computes now. Collective."""
    schedule = unit.schedule
    schedule.settle()
    if not schedule.computes(unit):
        try:
            if not unit.is_shown:
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
    """Reshard a unit; a later backward gathers it again. Not a collective."""
    schedule = unit.schedule
    schedule.settle()
    backward = schedule.current.backward
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
    """The units of a module and of those inside it."""
    found: set[Unit] = set()
    for child in module.modules():
        unit = getattr(child, "_flat_param", None)
        if unit is STOPPED:
            raise StateError(
                f"flat_param.fully_shard: {type(child).__name__} was only partly sharded when it "
                "was interrupted, but a rank cannot put its pieces back together. Build the module "
                "again on every rank, and shard that."
            )
        if isinstance(unit, Unit) and unit not in found:
            found.add(unit)
            yield unit


def units_at_rest(module: nn.Module, function: str = "state_dict") -> list[Unit]:
    """The units of a module and below, after `put_to_rest`."""
    units = list(units_below(module))
    for unit in units:
        put_to_rest(unit, function)
    return units


def put_to_rest(unit: Unit, function: str) -> None:
    """Reshard a unit that `unshard` gathered, and copy pieces with other memory into the shard.

    Raises:
        StateError: a forward or backward runs; it names the called function.
    """
    schedule = unit.schedule
    schedule.settle()
    if schedule.depth or schedule.current.backward is not None:
        raise StateError(
            f"flat_param.{function}: called inside forward or backward, where the module has "
            "unsharded parameters. Call it between steps."
        )
    if unit.is_by_hand:
        unit.reshard()
        schedule.was_freed(unit)
    for part in unit.parts:
        part.synchronize()
    unit.take_changes()


@contextmanager
def full_params(module: nn.Module, *, write_back: bool) -> Iterator[None]:
    """Context with full copies of the parameters of all units below a module. Collective.

    Raises:
        StateError: called during forward or backward, or inside another such context.
        ParameterError: one was replaced, and is to be written back.
    """
    units = units_at_rest(module, "whole_params")
    copies = {unit: {part: _copies_of(part) for part in unit.parts} for unit in units}
    try:
        for unit in units:
            unit.copies = copies[unit]
            unit.swap_out()
        yield
    finally:
        errors = [unit.drop_copies() for unit in units]
    if write_back:
        for error in filter(None, errors):
            raise error
        for unit in units:
            for part, wholes in copies[unit].items():
                for index, whole in enumerate(wholes):
                    part.load_full(index, whole)
            unit.reshard()


def _copies_of(part: ShardedSegment) -> tuple[nn.Parameter, ...]:
    """Gather the full parameters of a segment into new memory, in the shard's dtype. Collective."""
    full = torch.empty(part.plan.numel, dtype=part.shard.dtype, device=part.device)
    part.gather_into(full).wait()
    wholes = zip(param_views(full, part.segment.layout), part.params, strict=True)
    copies = tuple(
        nn.Parameter(part.placed(index, whole), requires_grad=param.requires_grad)
        for index, (whole, param) in enumerate(wholes)
    )
    for copy, piece in zip(copies, part.pieces, strict=True):
        mark_shown(copy, label=piece.label)
    return copies
