"""Takes the tensors out of a call, so that the call can be repeated without holding them."""

from __future__ import annotations

import enum
import types
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

_CONSTANT = frozenset(
    {*(type(None), bool, int, float, complex, str, bytes, range, slice, type(...))}
    | {torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, torch.Generator}
)
_OPAQUE = (nn.Module, type, types.FunctionType, types.ModuleType, enum.Enum, torch.optim.Optimizer)
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)


class _Place(int):
    """Position of a tensor among the tensors of a call."""


class _MayChangeError(Exception):
    """An argument may have other contents when the call is repeated."""


def parted(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], list[torch.Tensor]] | None:
    """Take the tensors out of a call, also those in tuples.

    Returns:
        A callable that makes the call from the tensors and holds none of them; and the tensors.
        None if an argument is a container or an object that may change, such as a cache.
    """
    tensors: list[torch.Tensor] = []
    try:
        rest = [_without(each, tensors) for each in args]
        named = {name: _without(each, tensors) for name, each in kwargs.items()}
    except _MayChangeError:
        return None
    return partial(_call, function, rest, named), tensors


def _without(value: Any, tensors: list[torch.Tensor]) -> Any:
    if type(value) in _CONSTANT:
        return value
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return _Place(len(tensors) - 1)
    if type(value) is tuple:
        return tuple([_without(each, tensors) for each in value])
    if isinstance(value, _OPAQUE):
        return value
    if isinstance(value, _CONTAINERS) or getattr(value, "__dict__", None):
        raise _MayChangeError
    return value


def _call(
    function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any], *tensors: torch.Tensor
) -> Any:
    """Call the function with the tensors back in their places."""
    given = [_with(each, tensors) for each in args]
    return function(*given, **{name: _with(each, tensors) for name, each in kwargs.items()})


def _with(value: Any, tensors: tuple[torch.Tensor, ...]) -> Any:
    if type(value) is _Place:
        return tensors[value]
    return tuple([_with(each, tensors) for each in value]) if type(value) is tuple else value
