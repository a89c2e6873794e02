"""Moves parameters into one flat buffer, in place.

Rule 1: `migrate` holds at most one parameter twice. It copies a parameter, lets go of the original,
and only then goes on to the next; the system hands out a large buffer's pages at first touch.
Rule 2: gaps are zero from the start, and nothing here writes to them afterwards.
Rule 3: a parameter stays the object it was; only its `data` changes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..layout._layout import FlatLayout
from ._views import param_views


def allocate(
    layout: FlatLayout, *, device: torch.device | None = None, numel: int | None = None
) -> Tensor:
    """An uninitialised buffer for a layout, gaps zeroed (Rule 2).

    Args:
        layout: gives dtype and numel.
        device: default: torch's default device.
        numel: elements to allocate where a shard plan pads the buffer; all beyond is zeroed.
    """
    size = layout.numel if numel is None else numel
    buffer = torch.empty(size, dtype=layout.dtype, device=device)
    zero_gaps_(buffer, layout)
    return buffer


def zero_gaps_(buffer: Tensor, layout: FlatLayout) -> Tensor:
    """Zero every element that belongs to no parameter, in place, and return the buffer."""
    for start, stop in layout.gaps:
        buffer[start:stop].zero_()
    buffer[layout.numel :].zero_()
    return buffer


def zeros(numel: int, *, dtype: torch.dtype, device: torch.device, pinned: bool = False) -> Tensor:
    """A `(numel,)` tensor of zeros, page-locked if asked."""
    return torch.zeros(numel, dtype=dtype, device=device, pin_memory=pinned)


@torch.no_grad()
def migrate(
    params: Sequence[nn.Parameter], layout: FlatLayout, *, buffer: Tensor | None = None
) -> Tensor:
    """Copy parameters into a buffer and make them views of it, one by one (Rules 1 and 3).

    Args:
        params: in layout order, of the layout's shapes.
        layout: where they go.
        buffer: default: a new one, on the first parameter's device.

    Returns:
        The buffer, `(layout.numel,)`.
    """
    if buffer is None:
        buffer = allocate(layout, device=params[0].device)
    for param, view in zip(params, param_views(buffer, layout), strict=True):
        view.copy_(param)
        param.data = view
    return buffer
