"""What a parameter becomes by being sent in low precision, one block after another, by hand."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flat_param import Scaled


def scale_of(largest: float, how: Scaled) -> float:
    """By search: the least that is allowed; a Python float."""
    if not math.isfinite(largest):
        return math.nan
    if largest == 0:
        return 1.0
    limit = torch.finfo(how.dtype).max
    if how.scale_dtype == torch.float32:
        return max(float(torch.tensor(largest) / limit), 2.0**-126)
    scale = 2.0**-126
    while largest / scale > limit:
        scale *= 2
    return scale


def as_sent(values: Tensor, how: Scaled, dtype: torch.dtype = torch.float32) -> Tensor:
    """The same shape, in the computing dtype.

    Blocks follow each other in the values' memory, or are tiles of matrices.
    """
    if not isinstance(how.block, int):
        return _tiles_as_sent(values.detach(), how.block, how, dtype)
    dims = sorted(range(values.dim()), key=lambda dim: -values.stride(dim))
    flat = values.detach().permute(dims).reshape(-1)
    rounded = [_block_as_sent(block, how, dtype) for block in flat.split(how.block)]
    found = torch.cat(rounded) if rounded else flat.to(dtype)
    inverse = sorted(range(len(dims)), key=dims.__getitem__)
    return found.view([values.shape[dim] for dim in dims]).permute(inverse)


def _tiles_as_sent(
    values: Tensor, tile: tuple[int, int], how: Scaled, dtype: torch.dtype
) -> Tensor:
    if values.dim() > 2:
        each = [_tiles_as_sent(matrix, tile, how, dtype) for matrix in values]
        return torch.stack(each) if each else values.to(dtype)
    found = values.to(dtype, copy=True)
    for rows, own_rows in zip(values.split(tile[0]), found.split(tile[0]), strict=True):
        for one, own in zip(rows.split(tile[1], 1), own_rows.split(tile[1], 1), strict=True):
            own.copy_(_block_as_sent(one.flatten(), how, dtype).view(one.shape))
    return found


def _block_as_sent(block: Tensor, how: Scaled, dtype: torch.dtype) -> Tensor:
    wide = block.to(torch.float32)
    magnitudes = [abs(value) for value in wide.tolist()]
    has_nan = any(map(math.isnan, magnitudes))
    scale = scale_of(math.nan if has_nan else max(magnitudes, default=0.0), how)
    return ((wide / scale).to(how.dtype).to(torch.float32) * scale).to(dtype)
