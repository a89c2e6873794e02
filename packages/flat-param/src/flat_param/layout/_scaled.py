"""What parameters are sent as where a gather is to be smaller: low precision, and scales.

Rule 1: a block is so many elements of one parameter that follow each other in memory, counted from
        its first one; the last block of a parameter may be shorter, and is filled with zeros.
Rule 2: blocks never straddle ranks: a layout begins each parameter at a multiple of the block, and
        ranks are cut there. So what a parameter becomes does not depend on the number of ranks.
Rule 3: a scale is as small as it can be while no element leaves the range of what is sent. It is
        one for a block of zeros, and not a number where an element of the block is not finite.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .._errors import LayoutError
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
        block: elements that share a scale; they follow each other in memory.
        scale_dtype: torch.float8_e8m0fnu, powers of two as MXFP8 has them, or torch.float32, the
            block's largest absolute value over the largest of `dtype`.
        min_dims: parameters with fewer dimensions are sent in the computing dtype, which is little
            for biases and norms; 0 leaves none out, so that a unit sends one message.

    Raises:
        LayoutError: another dtype, or a number that is too small.

    Example:
        >>> Scaled(block=128).message_bytes(3)  # of three blocks and their scales
        387
    """

    dtype: torch.dtype = torch.float8_e4m3fn
    block: int = 32
    scale_dtype: torch.dtype = torch.float8_e8m0fnu
    min_dims: int = 2

    def __post_init__(self) -> None:
        _check_one_of("dtype", self.dtype, _SENT)
        _check_one_of("scale_dtype", self.scale_dtype, _SCALES)
        _check_number("block", self.block, 1, "a scale is of one element at least", "32, or 128")
        _check_number("min_dims", self.min_dims, 0, "dimensions are counted", "2, or 0 for all")

    def takes(self, spec: ParamSpec) -> bool:
        """Whether a parameter is sent so: others have few dimensions, or no wider elements."""
        is_wider = spec.dtype.is_floating_point and spec.dtype.itemsize > self.dtype.itemsize
        return is_wider and len(spec.shape) >= self.min_dims

    def message_bytes(self, blocks: int) -> int:
        """Bytes of so many blocks with their scales."""
        return blocks * (self.block * self.dtype.itemsize + self.scale_dtype.itemsize)


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


def _check_number(name: str, found: object, least: int, rule: str, use: str) -> None:
    if type(found) is not int or found < least:
        raise LayoutError(f"flat_param.Scaled: {name} is {found!r}, but {rule}. Use {use}.")
