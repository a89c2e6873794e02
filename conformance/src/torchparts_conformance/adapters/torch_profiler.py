"""The adapter of `torch.profiler`, for what it says of a step that mod-tracker says, too.

`with_flops` counts products of matrices and convolutions, and `profile_memory` watches what is
allocated. It has no formulas of a caller, and no row of a module: a module is a span of Python
there, of its forward, by class and number. So times, traces and names of modules are not provided.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from torchparts_conformance import Implementation, NotProvided

_NO_FORMULA = "with_flops counts products of matrices and convolutions"


class _Report(profile):
    """A report is the profiler itself."""

    def __getattr__(self, name: str) -> Any:
        raise NotProvided(f"torch.profiler has no {name}")

    def __getitem__(self, name: str) -> Any:
        raise NotProvided("torch.profiler has no row of a module with phases")


class _Flops(_Report):
    def __init__(self, *roots: Any) -> None:
        super().__init__(activities=[ProfilerActivity.CPU], with_flops=True)

    @property
    def total(self) -> int:
        """Operations of the run."""
        return sum(event.flops or 0 for event in self.events() or ())


class _Memory(_Report):
    def __init__(self, *roots: Any) -> None:
        super().__init__(activities=[ProfilerActivity.CPU], profile_memory=True)


class _Part:
    profile_flops = _Flops
    profile_memory = _Memory

    def __getattr__(self, name: str) -> Any:
        raise NotProvided(f"torch.profiler has no {name}")


def implementation() -> Implementation:
    """Adapt the profiler of the installed torch."""
    return Implementation(
        name="torch profiler",
        version=torch.__version__,
        distributions=("torch",),
        parts={"mod-tracker": _Part()},
        capabilities={"mod-tracker": frozenset({"reports"})},
        lacks={"mod-tracker": dict.fromkeys(("MT-405", "MT-407", "MT-251", "MT-409"), _NO_FORMULA)},
    )
