"""Record which flattened module or unit owns the memory of a parameter.

Two owners side by side would train separate values of one parameter. So tied parameters must be
flattened or sharded together.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from .._errors import ParameterError

FLATTENED, UNIT = "a flattened module", "a unit"
IGNORED = "what is ignored by a unit"


class Owner:
    """The owner of some parameters, until it is dropped or garbage.

    Args:
        kind: `FLATTENED`, `UNIT` or `IGNORED`.
        module: the flattened or sharded module.
        named: its parameters and their names.
    """

    def __init__(
        self, kind: str, module: nn.Module, named: Iterable[tuple[str, nn.Parameter]]
    ) -> None:
        self.module = weakref.ref(module)
        self.is_dropped = False
        for name, param in named:
            _owners[kind][param] = weakref.ref(self), name


_owners: dict[str, Any] = {kind: WeakTensorKeyDictionary() for kind in (FLATTENED, UNIT, IGNORED)}
"""By kind and parameter: a reference to the owner, and the parameter's name in it."""


def owner_of(param: nn.Parameter, kind: str) -> tuple[Owner | None, str]:
    """Return the owner of a kind, and the parameter's name in it."""
    found, name = _owners[kind].get(param, (None, ""))
    owner = found and found()
    return (None, "") if owner is None or owner.is_dropped else (owner, name)


def check_owners(
    caller: str,
    module: nn.Module,
    named: Iterable[tuple[str, nn.Parameter]],
    kinds: Sequence[str],
    *,
    never: Sequence[str] = (),
) -> None:
    """Refuse parameters that an owner of `kinds` already has.

    An owner side by side with the module is refused, and so is an outer unit: inner modules become
    units first. Owners of the kinds in `never` are refused in any case.
    """
    for name, param in named:
        for kind in kinds:
            owner, theirs = owner_of(param, kind)
            if owner is None:
                continue
            own = owner.module()
            is_around = own is not None and any(module is one for one in own.modules())
            is_inside = any(own is one for one in module.modules())
            if own is not None and not (is_around or is_inside):
                raise ParameterError(
                    f"flat_param.{caller}: parameter '{name}' is tied to '{theirs}' in {kind} "
                    "beside this module, but tied parameters are moved together. Flatten or shard "
                    "their common parent."
                )
            if kind in never:
                raise ParameterError(f"flat_param.{caller}: parameter '{name}' {_WHY_NOT[kind]}")
            if kind == UNIT and is_around and not is_inside:
                raise ParameterError(
                    f"flat_param.{caller}: parameter '{name}' is divided already, as '{theirs}' "
                    "of the unit around this module, but inner modules must become units first. "
                    "Call fully_shard on this one before the one around it."
                )


_WHY_NOT = {
    UNIT: (
        "is sharded by fully_shard, so this rank has a piece of it, but only whole parameters can "
        "be flattened. Give the optimizer module.parameters(), or flatten modules that are not "
        "sharded."
    ),
    FLATTENED: (
        "lies in the buffer of a flattened module, but only parameters with memory of their own "
        "can be sharded. Call flat_param.unflatten on that module first."
    ),
}
