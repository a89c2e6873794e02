"""The adapter of torch's public `ModuleTracker` and `FlopCounterMode`, and of its `MemTracker`.

`ModuleTracker` has the running modules and the direction, but no user hooks and no module names.
`FlopCounterMode` counts a run by module, without phases and without the outside of modules.
`MemTracker` tracks memory; its results per module are snapshots by kind, which do not add up. None
of them has queries, or hooks under torch.compile.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.module_tracker import ModuleTracker

from torchparts_conformance import Implementation
from torchparts_conformance.adapters import inside_torch

_NO_HOOKS = "ModuleTracker has no user hooks"
_OF_HOOKS = (
    *("MT-006", "MT-007", "MT-008", "MT-009", "MT-010", "MT-011", "MT-103", "MT-108", "MT-109"),
    *("MT-111", "MT-116", "MT-117", "MT-118", "MT-119", "MT-120", "MT-121", "MT-124", "MT-131"),
    *("MT-132", "MT-137"),
)


class _FlopCounter(FlopCounterMode):
    """The counter is its own report."""

    def __init__(self, *roots: Any) -> None:
        super().__init__(display=False)

    @property
    def total(self) -> int:
        """Operations of the run."""
        return self.get_total_flops()


class _MemTracker(inside_torch.MemTracker):
    """The tracker is its own report; models are passed to it beforehand."""

    def __init__(self, *roots: Any) -> None:
        super().__init__()
        self.track_external(*roots)


def implementation() -> Implementation:
    """Adapt the tools of the installed torch."""
    return Implementation(
        name="torch tools",
        version=torch.__version__,
        distributions=("torch",),
        parts={
            "mod-tracker": types.SimpleNamespace(
                ModTracker=ModuleTracker, profile_flops=_FlopCounter, profile_memory=_MemTracker
            )
        },
        capabilities={"mod-tracker": frozenset({"reports"})},
        lacks={
            "mod-tracker": {
                **dict.fromkeys(_OF_HOOKS, _NO_HOOKS),
                **dict.fromkeys(("MT-012", "MT-105"), "ModuleTracker has no module names"),
            }
        },
    )
