"""Takes the tensors out of a call, so that the call can be made again without holding them."""

from __future__ import annotations

import enum
import types
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

_ATOMS = frozenset(
    {*(type(None), bool, int, float, complex, str, bytes, range, slice, type(...))}
    | {torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, torch.Generator}
)
_OPAQUE = (nn.Module, type, types.FunctionType, types.ModuleType, enum.Enum, torch.optim.Optimizer)


class _Place(int):
    """Position of a tensor among the tensors of a call."""


_PARTED = (_Place, tuple)


class _HasContentsError(Exception):
    """An argument may have changed when the call is made again."""


def parted(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], list[torch.Tensor]] | None:
    """Take the tensors out of a call, each once; tensors in tuples too.

    Args:
        function: the called function.
        args: its positional arguments.
        kwargs: its keyword arguments.

    Returns:
        A callable that makes the call from the tensors and holds none of them; and the tensors.
        None where an argument is a container or an object that may have changed by then.
    """
    tensors: list[torch.Tensor] = []
    places: dict[int, _Place] = {}
    try:
        # Most arguments of blocks besides tensors are numbers or None: a fast path for them.
        rest = [each if type(each) in _ATOMS else _without(each, tensors, places) for each in args]
        named = {
            name: each if type(each) in _ATOMS else _without(each, tensors, places)
            for name, each in kwargs.items()
        }
    except _HasContentsError:
        return None
    return partial(_put_together, function, rest, named), tensors


# Module-level functions: a closure that calls itself is a cycle, and would hold the tensors.
def _without(value: Any, tensors: list[torch.Tensor], places: dict[int, _Place]) -> Any:
    if isinstance(value, torch.Tensor):
        place = places.get(id(value))
        if place is None:
            place = places[id(value)] = _Place(len(tensors))
            tensors.append(value)
        return place
    if type(value) is tuple:
        return tuple(_without(each, tensors, places) for each in value)
    if type(value) in _ATOMS or _is_opaque(value):
        return value
    raise _HasContentsError


def _is_opaque(value: Any) -> bool:
    """Whether a value is a module, a function or a type, or has no contents."""
    return isinstance(value, _OPAQUE) or not (
        isinstance(value, (torch.Tensor, list, tuple, dict, set, frozenset, deque))
        or getattr(value, "__dict__", None)
    )


def _put_together(
    function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any], *tensors: torch.Tensor
) -> Any:
    """Call the function with the tensors back in their places."""
    given = [_with(each, tensors) if type(each) in _PARTED else each for each in args]
    named = {
        name: _with(each, tensors) if type(each) in _PARTED else each
        for name, each in kwargs.items()
    }
    return function(*given, **named)


def _with(value: Any, tensors: tuple[torch.Tensor, ...]) -> Any:
    if type(value) is _Place:
        return tensors[value]
    return tuple(_with(each, tensors) for each in value) if type(value) is tuple else value
