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
        self._module = weakref.ref(module)
        self.is_dropped = False
        for name, param in named:
            _owners[kind][param] = weakref.ref(self), name

    def drop(self) -> None:
        """Release all parameters."""
        self.is_dropped = True

    def is_around(self, module: nn.Module) -> bool:
        """Whether the module is inside the owner's module."""
        own = self._module()
        return own is not None and own is not module and _has(own, module)

    def is_beside(self, module: nn.Module) -> bool:
        """Whether neither of the two modules is inside the other."""
        own = self._module()
        return own is not None and not _has(own, module) and not _has(module, own)


def _has(module: nn.Module, other: nn.Module) -> bool:
    return any(other is one for one in module.modules())


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
    never: str = "",
) -> None:
    """Refuse parameters that an owner of `kinds` already has.

    An owner side by side with the module is refused, and so is an outer unit: inner modules become
    units first. Owners of the kind `never` are refused in any case.
    """
    for name, param in named:
        for kind in kinds:
            owner, theirs = owner_of(param, kind)
            if owner is None:
                continue
            if owner.is_beside(module):
                raise ParameterError(
                    f"flat_param.{caller}: parameter '{name}' is tied to '{theirs}' in {kind} "
                    "beside this module, but tied parameters are moved together. Flatten or shard "
                    "their common parent."
                )
            if kind == never:
                raise ParameterError(f"flat_param.{caller}: parameter '{name}' {_WHY_NOT[kind]}")
            if kind == UNIT and owner.is_around(module):
                raise ParameterError(
                    f"flat_param.{caller}: parameter '{name}' is divided already, as '{theirs}' "
                    "of the unit around this module, but inner modules must become units first. "
                    "Call fully_shard on this one before the one around it."
                )


def check_unowned(caller: str, named: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Refuse a parameter of any unit or flattened module."""
    for name, param in named:
        for kind, why in _WHY_NOT.items():
            if owner_of(param, kind)[0] is not None:
                raise ParameterError(f"flat_param.{caller}: parameter '{name}' {why}")


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
