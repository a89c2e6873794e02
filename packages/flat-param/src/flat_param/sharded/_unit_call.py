"""Run a module, or a method of it, as a forward of its unit."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakValueDictionary

from torch import nn

from .._errors import StateError
from .._torch_compat import pass_over_frames

_classes: WeakValueDictionary[tuple[object, ...], type] = WeakValueDictionary()


def run_unit(
    module: Any, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call `run` as a forward of the module's unit. Collective."""
    unit = module._flat_param
    depth = unit.schedule.depth
    try:
        args, kwargs = unit.begin_forward(unit, args, kwargs)
        return unit.end_forward(unit, module, run(*args, **kwargs))
    except BaseException:
        unit.schedule.stop(depth)
        raise


def sharded_class(
    base: type[nn.Module], cls: type[nn.Module], methods: Mapping[str, Callable[..., Any]]
) -> Any:
    """The sharded subclass of a class, which also runs `methods` as forwards of their units.

    Modules of one class share it and its compiled code.

    Args:
        base: `ShardedModule`, whose own call runs `run_unit`.
        cls: the original class of the modules.
        methods: names of methods of `cls`.
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
