"""Memory growth of a tracker while a model runs only forward."""

from __future__ import annotations

import tracemalloc

import torch
from torch import nn

from mod_tracker import ModTracker


def test_growth_over_inference(capsys):
    """10,000 forwards of ten layers use less than 1 MB and record nothing."""
    model, x = nn.Sequential(*[nn.Linear(4, 4) for _ in range(10)]), torch.randn(2, 4)
    with ModTracker() as tracker, torch.no_grad():
        model(x)
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(10_000):
            model(x)
        growth = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
    intervals = len(tracker._attribution.state().record)
    with capsys.disabled():
        print(f"\n10,000 forwards: {growth} bytes more, {intervals} intervals recorded")
    assert growth < 1_000_000
    assert intervals == 0
