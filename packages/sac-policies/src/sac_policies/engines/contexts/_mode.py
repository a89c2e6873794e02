"""What the two modes of a region share: its table, and their place among the active modes."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from ..._torch_compat import Hooks
from ...policies._views import Operator
from .._engine_disabled import EngineDisabled
from .._fsdp import Ranges
from ._op_table import OpTable, Waiting
from ._regions import Region


class Mode(TorchDispatchMode):
    """What both modes share: the region, its table, their place among the active modes."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Count a compiled callable as one operator; do not look inside."""
        return True

    supports_higher_order_operators = True
    recomputes = False

    def __init__(self, region: Region, op_table: OpTable) -> None:
        # torch sets a mode's own fields on entering it; the recompute mode may never be.
        self.region = region
        self.op_table: OpTable | EngineDisabled | Waiting = op_table
        self.own = op_table
        self.ranges = Ranges()
        # Hooks that a recomputation registered; None in a forward.
        self.handles: list[RemovableHandle] | None = None
        # Those around the mode when it was entered: its checkpoint's.
        self.hooks: Hooks | None = None

    @property
    def waits(self) -> bool:
        """Whether what runs now is not the region's."""
        return self.op_table is not self.own

    def follow(self, op: Operator, args: tuple[Any, ...]) -> None:
        """Look away while FSDP is at work (Rule 3)."""
        self.ranges.follow(op, args)
        self.op_table = EngineDisabled() if self.ranges.inside else self.own
