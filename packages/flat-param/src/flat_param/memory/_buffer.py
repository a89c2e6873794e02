"""Moves parameters into one flat buffer, in place.

Rule 1: `migrate` holds at most one parameter twice. It copies a parameter, lets go of the original,
and only then goes on to the next; the system hands out a large buffer's pages at first touch. A
huge page may reach beyond a parameter only where that is smaller than the largest by as much.
Rule 2: gaps are zero from the start, and nothing here writes to them afterwards.
Rule 3: a parameter stays the object it was; only its `data` changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from ..layout._layout import FlatLayout
from ._huge_pages import HUGE_PAGE_BYTES, prefer_huge_pages
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


def spacious(layout: FlatLayout, device: torch.device) -> Tensor:
    """An uninitialised buffer for `migrate`, on huge pages where there are any (Rule 1)."""
    buffer = allocate(layout, device=device)
    for start, stop in _slices(layout):
        prefer_huge_pages(buffer[start:stop])
    return buffer


def zero_gaps_(buffer: Tensor, layout: FlatLayout) -> Tensor:
    """Zero every element that belongs to no parameter, in place, and return the buffer."""
    for start, stop in layout.gaps:
        buffer[start:stop].zero_()
    buffer[layout.numel :].zero_()
    return buffer


def zeros(numel: int, *, dtype: torch.dtype, device: torch.device, pinned: bool = False) -> Tensor:
    """A `(numel,)` tensor of zeros, page-locked or on huge pages where there are any."""
    buffer = torch.empty(numel, dtype=dtype, device=device, pin_memory=pinned)
    if not pinned:
        prefer_huge_pages(buffer)
    return buffer.zero_()


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
        buffer = spacious(layout, params[0].device)
    for param, view in zip(params, param_views(buffer, layout), strict=True):
        view.copy_(param)
        param.data = view
    return buffer


def _slices(layout: FlatLayout) -> Iterator[tuple[int, int]]:
    """The buffer, cut behind each parameter that is about as large as the largest (Rule 1)."""
    critical = max(spec.numel for spec in layout.specs)
    critical -= HUGE_PAGE_BYTES // layout.dtype.itemsize
    begin = 0
    for spec, (_, stop) in zip(layout.specs, layout.ranges, strict=True):
        if spec.numel > critical:
            yield begin, stop
            begin = stop
    yield begin, layout.numel
