"""Who moves a parameter's values: a flattened module or a unit, found from the parameter.

Two that do not lie inside one another would each train values of its own, though the parameter is
one: what is tied has to be flattened or sharded together.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from weakref import WeakValueDictionary

from torch import nn

from .._errors import ParameterError

FLATTENED, UNIT = "a flattened module", "a unit"
IGNORED = "what is ignored by a unit"

_owners: dict[str, WeakValueDictionary[int, Owner]] = {
    FLATTENED: WeakValueDictionary(),
    UNIT: WeakValueDictionary(),
    IGNORED: WeakValueDictionary(),
}
"""By kind, then by `id` of a parameter; where that is gone, another may have its `id`."""


class Owner:
    """What moves the values of some parameters, for as long as it is kept.

    Args:
        kind: `FLATTENED` or `UNIT`; or `IGNORED`, of what it leaves to its user.
        module: what was flattened or sharded.
        named: its parameters with their names in it.
    """

    def __init__(
        self, kind: str, module: nn.Module, named: Iterable[tuple[str, nn.Parameter]]
    ) -> None:
        self.kind = kind
        self._module = weakref.ref(module)
        self._params = {id(param): (weakref.ref(param), name) for name, param in named}
        for key in self._params:
            _owners[kind][key] = self

    def name_of(self, param: nn.Parameter) -> str | None:
        """The parameter's name in the module; None if it is another one with the same `id`."""
        known, name = self._params[id(param)]
        return name if known() is param else None

    def is_beside(self, module: nn.Module) -> bool:
        """Whether neither of the two modules is inside the other."""
        own = self._module()
        if own is None:
            return False
        return all(module is not one for one in own.modules()) and all(
            own is not one for one in module.modules()
        )

    def is_around(self, module: nn.Module) -> bool:
        """Whether the module is inside the one whose parameters these are."""
        own = self._module()
        return own is not None and own is not module and any(module is one for one in own.modules())


def _owner_of(param: nn.Parameter, kind: str) -> tuple[Owner | None, str]:
    owner = _owners[kind].get(id(param))
    name = None if owner is None else owner.name_of(param)
    return (None, "") if name is None else (owner, name)


def check_not_inside(module: nn.Module, named: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Refuse a module whose parameters a unit around it has already divided.

    Raises:
        ParameterError: names the first such parameter in both.
    """
    for name, param in named:
        owner, theirs = _owner_of(param, UNIT)
        if owner is not None and owner.is_around(module):
            raise ParameterError(
                f"flat_param.fully_shard: parameter '{name}' is divided already, as '{theirs}' of "
                "the unit around this module, but inner modules must become units first. Call "
                "fully_shard on this one before the one around it."
            )


def check_owners(
    caller: str,
    module: nn.Module,
    named: Iterable[tuple[str, nn.Parameter]],
    kinds: Sequence[str],
) -> None:
    """Refuse a parameter whose values something beside the module moves.

    Raises:
        ParameterError: names the parameter in both.
    """
    for name, param in named:
        for kind in kinds:
            owner, theirs = _owner_of(param, kind)
            if owner is not None and owner.is_beside(module):
                raise ParameterError(
                    f"flat_param.{caller}: parameter '{name}' is tied to '{theirs}' in {kind} "
                    "beside this module, but tied parameters are moved together. Flatten or shard "
                    "their common parent."
                )


def check_unowned(caller: str, named: Iterable[tuple[str, nn.Parameter]], kind: str) -> None:
    """Refuse a parameter whose values something of a kind moves, wherever that is.

    Raises:
        ParameterError: names the parameter.
    """
    for name, param in named:
        owner, _ = _owner_of(param, kind)
        if owner is not None:
            raise ParameterError(f"flat_param.{caller}: parameter '{name}' {_WHY_NOT[kind]}")


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
