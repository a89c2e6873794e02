"""Whether the memory of a parameter is its own, a flattened module's or a unit's.

Two owners side by side would train separate values of one parameter. So tied parameters must be
flattened or sharded together.
"""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterable
from typing import Any

from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from .._errors import ParameterError

PIECE = "_flat_param_piece"
"""Attribute of a parameter that a unit has divided; see sharded/tensor/_param_piece.py."""

_flattened: Any = WeakTensorKeyDictionary()
"""Weak references to the segments of flattened modules, by parameter."""


def own(segment: object, params: Iterable[nn.Parameter]) -> None:
    """Register the segment of a flattened module that has the memory of parameters."""
    for param in params:
        _flattened[param] = weakref.ref(segment)


def disown(params: Iterable[nn.Parameter]) -> None:
    """Remove what `own` has registered."""
    for param in params:
        _flattened.pop(param, None)


def owner_of(param: nn.Parameter) -> Any:
    """The segment of a flattened module that has a parameter's memory; None without one."""
    found = _flattened.get(param)
    return found and found()


def check_whole(
    caller: str, named: Iterable[tuple[str, nn.Parameter]], *, own: Container[object] = ()
) -> None:
    """Refuse parameters of units, and of flattened modules with other segments than `own`."""
    for name, param in named:
        piece = getattr(param, PIECE, None)
        if piece is not None:
            raise ParameterError(
                f"flat_param.{caller}: parameter '{name}' is sharded by fully_shard, as "
                f"{piece.label}, so this rank has a piece of it, but only whole parameters can be "
                "flattened or sharded. Shard a module before the one around it, and tied "
                "parameters with their common parent."
            )
        owner = owner_of(param)
        if owner is not None and owner not in own:
            raise ParameterError(
                f"flat_param.{caller}: parameter '{name}' lies in the buffer of a flattened "
                "module, but a parameter has one owner. Call flat_param.unflatten on that module "
                "first, and flatten or shard tied parameters with their common parent."
            )
