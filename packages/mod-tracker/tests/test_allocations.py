"""Which bytes count as allocated."""

from __future__ import annotations

import torch
from torch import nn

from mod_tracker import profile_memory


class InPlace(nn.Module):
    def forward(self, x):
        return x.mul_(2).view(-1)


def test_what_was_there_before_is_not_counted():
    """Changed in place or seen through a view, it is neither allocated, nor freed when it goes."""
    x, model = torch.ones(1000), InPlace()
    with profile_memory() as report:
        y = model(x)
        del x, y
    assert report.rows == {}
    assert (report.total, report.totals["freed"], report.peak) == (0, 0, 0)


def test_what_a_module_makes_is_counted_once_and_freed_once():
    """Views of it, and changes of it in place, add nothing."""
    with profile_memory() as report:
        y = nn.Sequential(nn.ReLU(), InPlace())(torch.ones(1000)[:])
        del y
    assert report["Sequential.0"].allocated == report["Sequential"].allocated == 4000
    assert report.totals["freed"] == report.total
