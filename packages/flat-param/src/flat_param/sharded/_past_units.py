"""Says which parameter was a piece where a forward has failed.

A module that is called past the unit to which its parameters belong, as one inside a block by the
model around the block, finds pieces there, and torch speaks of shapes. Nothing is looked at before
something fails.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import TracebackType

from torch import nn

from .._errors import FlatParamError, StateError
from ._param_sites import ParamSite
from ._unit import Unit


def piece_error(error: BaseException, units: Iterable[Unit]) -> StateError | None:
    """What to raise in the place of an error that a piece of a parameter has caused.

    Args:
        error: as the call of a unit catches it.
        units: of the tree, which may be whole or not.

    Returns:
        None where the module that has failed holds no piece, or the error is our own.
    """
    if isinstance(error, FlatParamError) or not isinstance(error, Exception):
        return None
    module = _innermost_module(error.__traceback__)
    if module is None:
        return None
    for unit in units:
        for site in _pieces_in(module, unit):
            return _named(site, unit, module)
    return None


def _innermost_module(trace: TracebackType | None) -> nn.Module | None:
    """The module whose method was running where an error came from.

    None where that was in the call of another unit, which has looked already: what it had whole
    are pieces now.
    """
    found, outer = None, trace and trace.tb_frame
    while trace is not None:
        code, values = trace.tb_frame.f_code, trace.tb_frame.f_locals
        if outer is not trace.tb_frame and outer is not None and outer.f_code is code:
            return None
        first = values.get(code.co_varnames[0]) if code.co_argcount else None
        found = first if isinstance(first, nn.Module) else found
        trace = trace.tb_next
    return found


def _pieces_in(module: nn.Module, unit: Unit) -> Iterator[ParamSite]:
    """Sites in a module itself that hold a piece now, not the whole parameter."""
    for site in unit.sites:
        piece, param = site.part.pieces[site.index], site.part.params[site.index]
        held = site.registry is module._parameters and site.registry.get(site.key) is param
        if held and piece.shape != piece.spec.shape:
            yield site


def _named(site: ParamSite, unit: Unit, module: nn.Module) -> StateError:
    piece = site.part.pieces[site.index]
    name = f"{unit.name}.{site.name}" if unit.name else site.name
    inner = name.rpartition(".")[0]
    return StateError(
        f"flat_param.fully_shard: parameter '{name}' is a piece of shape {piece.shape} where "
        f"{type(module).__name__} computes with it, but only a call of unit '{unit.name}' makes it "
        f"whole, {piece.spec.shape}. Call fully_shard on '{inner}' first, which makes it a unit "
        f"that may be called by any path, or do not shard '{unit.name}' by itself."
    )
