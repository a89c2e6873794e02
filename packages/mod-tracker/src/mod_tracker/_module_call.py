"""A module call in words, for those who ask about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import nn

from ._record import Call, root_of


@dataclass(frozen=True)
class ModuleCall:
    """One call of a module.

    Attributes:
        name: canonical name: root label, dot, state_dict prefix.
        called_as: the same, but by the way the module was reached; differs for shared modules.
        stack: canonical names from the root to this module.
        call_index: how often this path had been called before in this thread.
        iteration: how often the root had been called before in this thread.
    """

    name: str
    called_as: str
    stack: tuple[str, ...]
    call_index: int
    iteration: int
    _module: Callable[[], nn.Module | None] = field(repr=False, compare=False)

    @property
    def module(self) -> nn.Module | None:
        """The module, or None if it no longer exists."""
        return self._module()

    @property
    def depth(self) -> int:
        """Number of modules in `stack`."""
        return len(self.stack)


def describe(call: Call) -> ModuleCall | None:
    """Return a call in words; None for the outside of all modules."""
    path, index, outer = call
    if outer is None:
        return None
    return ModuleCall(
        name=path.name,
        called_as=path.called_as,
        stack=path.names(),
        call_index=index,
        iteration=root_of(call)[1],
        _module=path.module,
    )
