"""Values in low precision with a scale for each block, see Rule 4 in layout/_scaled.py.

Every step is exact or rounded once, as IEEE 754 and torch's casts say, so that all devices and all
ranks get the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from .._errors import ParameterError
from ..layout._scaled import Scaled
from ..layout._tiles import Tile, grid_of

# A float32 whose exponent field is this far above its exponent; the smallest normal one's.
_BIAS, _LEAST_EXPONENT, _MANTISSA_BITS = 127, -126, 23


def quantize(values: Tensor, how: Scaled) -> tuple[Tensor, Tensor]:
    """Round blocks to low precision.

    Args:
        values: `(blocks, block)`, of a floating-point dtype; taken as float32.
        how: dtypes.

    Returns:
        Low-precision values, shaped like `values`, and scales, `(blocks,)`.
    """
    wide = values.to(torch.float32)
    scales = _scales(wide.abs().amax(-1), how)
    return (wide / scales.to(torch.float32)[..., None]).to(how.dtype), scales


def dequantize_(out: Tensor, low: Tensor, scales: Tensor) -> None:
    """Write to `out` what low-precision values stand for, rounded once.

    Args:
        out: `(..., blocks, block)`, of a floating-point dtype.
        low: of the same shape.
        scales: `(..., blocks)`.
    """
    _multiply(out, low, scales.to(torch.float32)[..., None])


def quantize_tiles(values: Tensor, how: Scaled) -> tuple[Tensor, Tensor]:
    """Round matrices to low precision, tile by tile.

    Args:
        values: `(matrices, rows, columns)`, of a floating-point dtype; taken as float32.
        how: dtypes and tile.

    Returns:
        Low-precision values, shaped like `values`, and scales,
        `(matrices, rows of tiles, columns of tiles)`.
    """
    assert how.tile is not None
    low = torch.empty_like(values, dtype=how.dtype)
    grid = grid_of(values.shape[1], values.shape[2], how.tile)
    scales = values.new_empty(len(values), *grid, dtype=how.scale_dtype)
    regions = zip(_tiled(values, scales, how.tile), _tiled(low, scales, how.tile), strict=True)
    for (tiles, own), (rounded, _) in regions:
        wide = tiles.to(torch.float32)
        own.copy_(_scales(wide.abs().amax((2, 4)), how))
        rounded.copy_(wide / _over_tiles(own))
    return low, scales


def dequantize_tiles_(out: Tensor, low: Tensor, scales: Tensor, how: Scaled) -> None:
    """Write to `out` what low-precision matrices stand for, rounded once.

    Args:
        out: `(matrices, rows, columns)`, of a floating-point dtype.
        low: of the same shape.
        scales: `(matrices, rows of tiles, columns of tiles)`.
        how: with the tile.
    """
    assert how.tile is not None
    regions = zip(_tiled(out, scales, how.tile), _tiled(low, scales, how.tile), strict=True)
    for (tiles, own), (rounded, _) in regions:
        _multiply(tiles, rounded, _over_tiles(own))


def _tiled(matrices: Tensor, scales: Tensor, tile: Tile) -> Iterator[tuple[Tensor, Tensor]]:
    """Tiles of one size, `(matrices, down, height, across, width)`, and their scales.

    Views: of whole tiles, and of those at the last rows and columns.
    """
    for top, height, down in _runs(matrices.shape[1], tile[0]):
        for left, width, across in _runs(matrices.shape[2], tile[1]):
            some = matrices.narrow(1, top * tile[0], down * height)
            some = some.narrow(2, left * tile[1], across * width)
            tiles = some.unflatten(2, (across, width)).unflatten(1, (down, height))
            yield tiles, scales[:, top : top + down, left : left + across]


def _runs(size: int, tile: int) -> Iterator[tuple[int, int, int]]:
    """First tile, size and number of the whole tiles, and of the one that is left."""
    whole, rest = divmod(size, tile)
    if whole:
        yield 0, tile, whole
    if rest:
        yield whole, rest, 1


def _over_tiles(scales: Tensor) -> Tensor:
    return scales.to(torch.float32)[:, :, None, :, None]


def _multiply(out: Tensor, low: Tensor, factors: Tensor) -> None:
    """Low values times float32 factors, rounded once to the dtype of `out`."""
    if out.dtype == torch.float64:  # which would not round the product
        out.copy_(low.to(torch.float32).mul_(factors))
    else:  # every dtype holds all low values, and torch multiplies in the wider one of two
        out.copy_(low)
        out.mul_(factors)


def _scales(largest: Tensor, how: Scaled) -> Tensor:
    """One for each block, from its largest absolute value."""
    limit = torch.finfo(how.dtype).max
    if how.scale_dtype == torch.float32:
        # By a tensor: what is divided by a number, CUDA multiplies by one over that.
        scales = (largest / torch.full_like(largest, limit)).clamp(
            min=torch.finfo(torch.float32).tiny
        )
    else:
        scales = _power_of_two(_exponents(largest, limit))
    scales = torch.where(largest == 0, 1.0, scales)
    return torch.where(largest.isfinite(), scales, torch.nan).to(how.scale_dtype)


def _exponents(largest: Tensor, limit: float) -> Tensor:
    """The least k for which `largest` is at most limit * 2**k."""
    top, top_exponent = math.frexp(limit)
    mantissas, exponents = torch.frexp(largest)
    return exponents - top_exponent + (mantissas > top)


def _power_of_two(exponents: Tensor) -> Tensor:
    """As a float32; below the least normal number there is none, as devices may flush it."""
    fields = exponents.clamp(min=_LEAST_EXPONENT) + _BIAS
    return (fields.to(torch.int32) << _MANTISSA_BITS).view(torch.float32)


def can_cast(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this torch casts float32 to `dtype`, and back, on a device: a few lack float8.

    Asked by doing so, as nothing tells.
    """
    one = torch.ones(1, device=device)
    try:
        again = one.to(dtype).to(torch.float32)
        return again.is_meta or again.item() == 1
    except (RuntimeError, TypeError):
        return False


def check_device(how: Scaled, device: torch.device) -> None:
    """Refuse a device that cannot cast to what is sent.

    Raises:
        ParameterError: names both.
    """
    for dtype in (how.dtype, how.scale_dtype):
        if not can_cast(dtype, device):
            raise ParameterError(
                f"flat_param.fully_shard: parameters are on {device} and sent in {dtype}, but "
                f"torch {torch.__version__} cannot cast to that there. Leave out gather= of "
                "MixedPrecision, and use param_dtype."
            )
