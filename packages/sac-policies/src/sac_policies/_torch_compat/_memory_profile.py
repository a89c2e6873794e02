"""The profiler, told to leave operators out."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.profiler import profile


class MemoryProfile(profile):
    """torch's profiler of allocations and of named ranges, and of no operator.

    Lost where torch starts its profiler otherwise: operators are noted too, which takes longer.
    """

    def __init__(self) -> None:
        super().__init__(profile_memory=True, use_kineto=True)

    def _start_trace(self) -> None:
        own: Any = torch._C
        try:
            ranges = {own._profiler.RecordScope.USER_SCOPE}
            own._autograd._enable_profiler(self.config(), self.kineto_activities, ranges)
        except (AttributeError, TypeError):  # another signature, refused before anything starts
            super()._start_trace()
