"""Borrowed buffers come back, and only the larger ones are kept."""

from __future__ import annotations

import torch

from flat_param.comm import _buffer_pool
from flat_param.comm._buffer_pool import acquire, release

CPU = torch.device("cpu")


def test_returned_buffer_is_lent_again() -> None:
    """A later, smaller need is met from what is there."""
    first = acquire(1000, dtype=torch.float64, device=CPU)
    release(first)
    assert acquire(900, dtype=torch.float64, device=CPU) is first


def test_buffer_in_use_is_never_lent() -> None:
    """Two borrowers have two buffers."""
    first = acquire(10, dtype=torch.float64, device=CPU)
    second = acquire(10, dtype=torch.float64, device=CPU)
    assert first.data_ptr() != second.data_ptr()


def test_three_largest_are_kept() -> None:
    """Small buffers go back to the system."""
    _buffer_pool._free.pop(torch.int16, None)
    for numel in (4, 1, 3, 5, 2):
        release(torch.empty(numel, dtype=torch.int16))
    assert [buffer.numel() for buffer in _buffer_pool._free.pop(torch.int16)] == [3, 4, 5]
