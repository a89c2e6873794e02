"""What offload moved is added up over a module and all below it, each once."""

from __future__ import annotations

import torch
from torch import nn

from ckpt_wrap import (
    OffloadStats,
    checkpoint_wrapper,
    offload_,
    offload_stats,
)


def test_statistics_count_a_module_once(tmp_path):
    """A module that finds missing attributes in the module it holds is not that module."""

    class Holds(nn.Module):
        def __init__(self, inner) -> None:
            super().__init__()
            self.inner = inner

        def __getattr__(self, name):
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(super().__getattr__("inner"), name)

        def forward(self, x):
            return self.inner(x)

    for wrap in (Holds, checkpoint_wrapper):
        inner = offload_(nn.Tanh(), to=tmp_path, min_bytes=1)
        inner(torch.randn(16, 16, requires_grad=True))
        assert offload_stats(wrap(inner)) == offload_stats(inner)


def test_counts_of_all_below_are_added_up(tmp_path):
    """Peaks as well, so that theirs is a bound; modules that are not offloaded count nothing."""
    model = nn.Sequential(nn.Tanh(), nn.Linear(16, 16), nn.Sequential(nn.Tanh()))
    parts = [model[0], model[2][0]]
    for part in parts:
        offload_(part, to=tmp_path, min_bytes=1)
    model(torch.randn(16, 16, requires_grad=True)).sum().backward()
    first, second = (offload_stats(part) for part in parts)
    assert (first.copies_out, second.copies_out) == (1, 1)
    whole = offload_stats(model)
    assert whole == OffloadStats(
        **{name: getattr(first, name) + getattr(second, name) for name in OffloadStats.__slots__}
    )
    assert whole.peak_bytes_away == 2 * 16 * 16 * 4


def test_a_module_without_offload_has_moved_nothing():
    """All counts are zero, which is no error."""
    assert offload_stats(nn.Linear(2, 2)) == OffloadStats()
