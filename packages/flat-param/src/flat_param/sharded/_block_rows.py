"""Optimizer state with one row per block of a parameter, such as scales of 8-bit moments.

- If a boundary keeps rows or blocks whole, a rank's state has one row per block that it holds, and
  the full tensor has all rows in order. The last block may be short and also has a row.
- A tensor counts as such state if its number of rows equals the number of blocks in the rank's
  piece or in the parameter. A tensor that several parameters share does not count, see
  `shared_rows`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..layout._boundary import boundaries_of, numel_of_block
from ..layout._shard import ShardPlan


@dataclass(frozen=True)
class BlockRows:
    """The blocks of a parameter that a rank holds, if it holds some but not all.

    Attributes:
        first: index of the first block.
        count: number of blocks.
        total: blocks of the parameter.
    """

    first: int
    count: int
    total: int

    def fits_piece(self, key: str, state: Any) -> bool:
        """Whether optimizer state has one row per block of this piece."""
        return _has_rows(key, state, self.count)

    def fits_whole(self, key: str, state: Any) -> bool:
        """Whether state of the whole parameter has one row per block."""
        return _has_rows(key, state, self.total)

    def of(self, whole: Tensor) -> Tensor:
        """Return this rank's rows of a full tensor; a view."""
        return whole[self.first : self.first + self.count]


def _has_rows(key: str, state: Any, count: int) -> bool:
    if key == "step" or not isinstance(state, Tensor) or not state.numel():
        return False
    return state.dim() > 0 and state.shape[0] == count


def block_rows(plan: ShardPlan, index: int, start: int, stop: int) -> BlockRows | None:
    """Blocks in `[start, stop)` of a parameter; None without blocks or if the range has all."""
    spec = plan.layout.specs[index]
    names = [each.name for each in plan.layout.specs]
    size = numel_of_block(spec.shape, spec.stride, boundaries_of(plan.boundary, names)[index])
    if not size or stop - start in (0, spec.numel):
        return None
    first = start // size
    return BlockRows(first, -(-stop // size) - first, -(-spec.numel // size))
