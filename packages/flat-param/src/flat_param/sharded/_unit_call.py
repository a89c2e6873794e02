"""Run a module as a forward of its unit, and name pieces in errors.

A module inside a unit may be called directly, for example by the model around the unit. It then
computes with pieces, and torch's error is about shapes. The piece is looked up after the error, so
this costs nothing in a step.
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
    """The sharded subclass of a class, which also runs `methods` as forwards of their units.

    Modules of one class share it, and so does the code that a compiler makes of it.

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
    """The sharded class with one more method that runs as a forward of its unit.

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
    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        return run_unit(self, functools.partial(method, self), args, kwargs)

    pass_over_frames(run)
    return run


def piece_error(error: BaseException, units: Iterable[Unit]) -> StateError | None:
    """The error to raise instead of one that a piece of a parameter has caused.

    Args:
        error: as the forward of a unit catches it.
        units: of the tree.

    Returns:
        None if the module that failed has no piece, or the error is one of this package.
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
    """The module whose method raised an error.

    None if it ran in the forward of another unit, which has looked already and is resharded.
    """
    # Skip the frame that caught the error: reading its locals would keep the error alive.
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
    """Sites in a module itself that have a piece now."""
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
