"""What a region does on each level, from nothing recomputed to everything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from .._torch_compat._module_calls import original
from ..policies._builders import offload, recompute_all, save_ops
from ..policies._policies import Policy

LEVELS = (
    "keeps everything",
    "keeps matmuls",
    "recomputes everything",
    "runs again",
    "offloads matmuls",
)
"""What a region does: no checkpointing; costly operators kept; nothing kept and values replayed;
nothing kept and a second forward, which also rebuilds what no replay can; costly operators moved to
the host, and the rest made again. The last is for accelerators."""
KEEPING = (3, 2, 4, 1, 0)
"""Levels by how much they keep on the device, least first."""
HOLDING = (3,)
"""Levels with a second forward, which has to have its arguments."""


@dataclass(frozen=True)
class RegionFit:
    """What one region of the model does.

    Attributes:
        path: of the module.
        level: one of "keeps everything", "keeps matmuls" (attention and convolutions, too),
            "recomputes everything", "runs again", and on accelerators "offloads matmuls".
        policy: for `checkpoint`; None where everything is kept, and where it runs again.
        kind: name of the module's class.
    """

    path: str
    level: str
    policy: Policy | None
    kind: str


@dataclass(frozen=True)
class Region:
    """A module, and what a plain step of it did."""

    path: str
    module: nn.Module
    operators: tuple[Any, ...]
    """Costly ones that ran in it."""
    wrote: tuple[str, ...] | None
    """Names of buffers that it writes to; None where it replaces them, and cannot run again."""
    rewrites: bool
    """Whether it writes to tensors that it is given."""
    is_compiled: bool = False
    """Whether what it keeps is a compiler's choice: it can only run again, or not."""

    def at(self, level: int) -> RegionFit:
        """What it does on a level."""
        does, policy = self._at(level)
        return RegionFit(self.path, does, policy, type(original(self.module)).__name__)

    def _at(self, level: int) -> tuple[str, Policy | None]:
        is_refused = self.is_compiled and (level < 3 or self.rewrites or self.wrote is None)
        if level == 0 or is_refused:
            return LEVELS[0], None
        if self.is_compiled:
            return LEVELS[3], None
        if level == 4 and self.operators:
            return LEVELS[4], offload(*self.operators)
        if level == 1 and self.operators:
            return LEVELS[1], save_ops(*self.operators)
        if level < 3 or self.wrote is None:
            return LEVELS[2], recompute_all()
        return LEVELS[3], None
