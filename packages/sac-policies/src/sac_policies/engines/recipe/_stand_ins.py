"""What is held in place of a saved tensor that is made again, for the one node that reads it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch.utils.weak import TensorWeakRef

from ..._torch_compat import modes_entered
from .._engine_disabled import own_work
from ._shared_values import SharedValue


class StandIn(ABC):
    """Makes the tensor when it is read.

    Attributes:
        cell: what its readers share.
    """

    __slots__ = ("cell",)

    def __init__(self) -> None:
        self.cell = SharedValue(readers=1)

    def read(self) -> torch.Tensor:
        """Return the tensor; modes around the region do not see how it is made."""
        if not modes_entered():
            return self.cell.get(self._made)
        with own_work():
            return self.cell.get(self._made)

    @abstractmethod
    def _made(self) -> torch.Tensor:
        """Make it, in backward."""


class WatchedStandIn(StandIn):
    """The same of a tensor that must not be written to.

    Args:
        tensor: as it was saved; it is not kept alive.
        changed: makes the error where it was written to since.
    """

    __slots__ = ("_changed", "_tensor", "_version")

    def __init__(self, tensor: torch.Tensor, changed: Callable[[], Exception]) -> None:
        super().__init__()
        self._tensor, self._version = TensorWeakRef(tensor), tensor._version
        self._changed = changed

    def read(self) -> torch.Tensor:
        """Return the tensor; raises where it was changed in place since."""
        now = self._tensor()
        if now is not None and now._version != self._version:
            raise self._changed()
        return super().read()
