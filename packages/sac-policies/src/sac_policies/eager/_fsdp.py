"""Recognize FSDP's own code inside a region.

FSDP gathers and frees parameters inside a region, in the forward but not always in the
recomputation (pytorch#185178). It also allocates, casts and views. All of that is in profiler
ranges, which dispatch modes see.
"""

from __future__ import annotations

from typing import Any

from .._torch_compat import RANGE_END, RANGE_START
from ..policies._views import Operator

RANGE_OPS = frozenset({RANGE_START, RANGE_END})
"""Operators to show to `Ranges.follow`."""


class Ranges:
    """Open profiler ranges."""

    def __init__(self) -> None:
        self._open: list[bool] = []

    @property
    def inside(self) -> bool:
        """Whether a range of FSDP is open."""
        return any(self._open)

    def follow(self, op: Operator, args: tuple[Any, ...]) -> None:
        """Open or close a range.

        Example:
            >>> ranges = Ranges()
            >>> ranges.follow(RANGE_START, ("FSDP::pre_forward",))
            >>> ranges.inside
            True
        """
        if op is RANGE_START:
            self._open.append(str(args[0]).startswith("FSDP::"))
        elif op is RANGE_END and self._open:
            self._open.pop()
