"""What parameters are sent as where a gather is to be smaller: low precision, and scales.

Rule 1: a block is so many elements of one parameter that follow each other in memory, counted from
        its first one; the last block of a parameter may be shorter, and is filled with zeros.
Rule 2: blocks never straddle ranks: a layout begins each parameter at a multiple of the block, and
        ranks are cut there. So what a parameter becomes does not depend on the number of ranks.
Rule 3: a block of two sizes is a tile of a matrix, see `_tiles`: ranks are cut between rows of
        tiles, and nothing is filled.
Rule 4: a scale is as small as it can be while no element leaves the range of what is sent. It is
        one for a block of zeros, and not a number where an element of the block is not finite.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .._errors import LayoutError
from ._boundary import is_row_major
from ._spec import ParamSpec

_SENT = (torch.float8_e4m3fn, torch.float8_e5m2)
_SCALES = (torch.float8_e8m0fnu, torch.float32)


@dataclass(frozen=True)
class Scaled:
    """Send parameters in float8, with a scale for each block, and compute with what arrives.

    What arrives is `(w / scale).to(dtype).to(torch.float32) * scale`, in the computing dtype. The
    shards, which the optimizer steps and checkpoints hold, keep their own dtype and values.

    Args:
        dtype: what is sent: torch.float8_e4m3fn, or torch.float8_e5m2.
        block: elements that share a scale. A number: that many consecutive elements in memory.
            Rows and columns: tiles of a matrix, (128, 128) as in DeepSeek's weights; of a tensor
            with more dimensions, of each matrix in the last two. Tiles at its end are smaller.
        scale_dtype: torch.float8_e8m0fnu, powers of two as MXFP8 has them, or torch.float32, the
            block's largest absolute value over the largest of `dtype`.
        min_dims: parameters with fewer dimensions are sent in the computing dtype, which is little
            for biases and norms; 0 leaves none out, so that a unit sends one message. At least 2
            with tiles, which also leave out what does not lie row by row in memory.

    Raises:
        LayoutError: another dtype, or a number that is too small.

    Example:
        >>> Scaled(block=128).message_bytes(3)  # of three blocks and their scales
        387
    """

    dtype: torch.dtype = torch.float8_e4m3fn
    block: int | tuple[int, int] = 32
    scale_dtype: torch.dtype = torch.float8_e8m0fnu
    min_dims: int = 2

    def __post_init__(self) -> None:
        _check_one_of("dtype", self.dtype, _SENT)
        _check_one_of("scale_dtype", self.scale_dtype, _SCALES)
        _check_block(self.block)
        _check_number("min_dims", self.min_dims, 0, "dimensions are counted", "2, or 0 for all")
        if self.tile is not None:
            object.__setattr__(self, "block", tuple(self.tile))
            rule = f"tiles of {self.block} are of matrices"
            _check_number("min_dims", self.min_dims, 2, rule, "2, or a number as block")

    @property
    def tile(self) -> tuple[int, int] | None:
        """Rows and columns that share a scale, where blocks are tiles."""
        return None if isinstance(self.block, int) else self.block

    def takes(self, spec: ParamSpec) -> bool:
        """Whether a parameter is sent this way: others have too few dimensions, or no wider
        elements."""
        is_wider = spec.dtype.is_floating_point and spec.dtype.itemsize > self.dtype.itemsize
        lies_well = self.tile is None or is_row_major(spec.shape, spec.stride)
        return is_wider and len(spec.shape) >= self.min_dims and lies_well

    def message_bytes(self, blocks: int) -> int:
        """Bytes of this many whole blocks with their scales."""
        block_numel = self.block if isinstance(self.block, int) else math.prod(self.block)
        return self.sent_bytes(blocks * block_numel, blocks)

    def sent_bytes(self, values: int, scales: int) -> int:
        """Bytes of this many values and scales."""
        return values * self.dtype.itemsize + scales * self.scale_dtype.itemsize


def _check_one_of(name: str, found: object, allowed: tuple[torch.dtype, ...]) -> None:
    if found not in allowed:
        raise LayoutError(
            f"flat_param.Scaled: {name} is {found!r}, but it must be one of "
            f"{', '.join(map(str, allowed))}. Use {allowed[0]}"
            + (
                ", or param_dtype of MixedPrecision for what needs no scales."
                if name == "dtype"
                else "."
            )
        )


def _check_block(found: object) -> None:
    if not isinstance(found, (tuple, list)):
        _check_number("block", found, 1, "a scale is for at least one element", "32, or (128, 128)")
    elif len(found) != 2 or any(type(size) is not int or size < 1 for size in found):
        raise LayoutError(
            f"flat_param.Scaled: block is {found!r}, but a tile has rows and columns, at least one "
            "of each. Use (128, 128), or a number for elements that follow each other."
        )


def _check_number(name: str, found: object, least: int, rule: str, use: str) -> None:
    if type(found) is not int or found < least:
        raise LayoutError(f"flat_param.Scaled: {name} is {found!r}, but {rule}. Use {use}.")
