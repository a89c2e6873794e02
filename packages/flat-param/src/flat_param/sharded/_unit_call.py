"""Runs what computes as a call of a unit, and says which parameter was a piece where it fails.

A module that is called past the unit to which its parameters belong, as one inside a block by the
model around the block, finds pieces there, and torch speaks of shapes. Nothing is looked at before
something fails.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any
from weakref import WeakValueDictionary

from torch import nn

from .._errors import FlatParamError, StateError
from .._torch_compat import pass_over_frames
from ._param_sites import ParamSite
from ._unit import Unit

_classes: WeakValueDictionary[tuple[object, ...], type] = WeakValueDictionary()


def run_unit(
    module: Any, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call `run` as a forward of the module's unit. Collective."""
    unit = module._flat_param
    depth = unit.schedule.depth
    named = None
    try:
        args, kwargs = unit.begin_forward(unit, args, kwargs)
        output = unit.end_forward(unit, module, run(*args, **kwargs))
    except BaseException as error:
        named = piece_error(error, unit.schedule.units)
        unit.schedule.stop(depth)
        if named is not None:
            raise named from error
        raise
    finally:
        del named  # its traceback has this frame
    return output


def sharded_class(
    base: type[nn.Module], cls: type[nn.Module], methods: Mapping[str, Callable[..., Any]]
) -> Any:
    """The class of modules that were of a class before, and run methods as calls of their units.

    Modules share it: what a compiler makes of one module's code is for others of its class, too.

    Args:
        base: `ShardedModule`, whose own call runs `run_unit`.
        cls: what the modules were of.
        methods: of `cls`, by name.
    """
    key = cls, *sorted(methods)
    made = _classes.get(key)
    if made is None:
        pass_over_frames(base.__call__, run_unit)
        own: dict[str, Any] = {name: _as_unit_call(each) for name, each in methods.items()}
        own |= {"_flat_param_class": cls, "_flat_param_methods": dict(methods)}
        made = _classes[key] = type(f"Sharded{cls.__name__}", (base, cls), own)
    return made


def with_method(cls: Any, name: str) -> Any:
    """The class of sharded modules that run one more method as a call of their units.

    Raises:
        StateError: the class has no such method, or it is the module's own call.
    """
    method = inspect.getattr_static(cls, name, None)
    if not inspect.isfunction(method) or name in vars(nn.Module):
        raise StateError(
            f"flat_param.register_forward_method: {name!r} is not a method that "
            f"{cls.__name__} defines, but only such methods can run with whole parameters. "
            "Pass the name of one; forward needs no registration."
        )
    known = cls._flat_param_methods
    if name in known:
        return cls
    return sharded_class(cls.__bases__[0], cls._flat_param_class, {**known, name: method})


def _as_unit_call(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that runs as a call of its module's unit."""

    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        return run_unit(self, functools.partial(method, self), args, kwargs)

    pass_over_frames(run)
    return run


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
    # Not of the frame that has caught the error: its locals, once asked for, would keep that.
    found, outer = None, None if trace is None else trace.tb_frame.f_code
    trace = None if trace is None else trace.tb_next
    while trace is not None:
        code, values = trace.tb_frame.f_code, trace.tb_frame.f_locals
        if outer is code:
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
