"""The cost of state_dict() with many wrappers."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

import ckpt_wrap


class Counting(OrderedDict):
    """Counts how many entries are gone through."""

    visited = 0

    def __iter__(self):
        Counting.visited += len(self)
        return super().__iter__()

    def keys(self):
        """All keys, counted."""
        Counting.visited += len(self)
        return super().keys()

    def items(self):
        """All items, counted."""
        Counting.visited += len(self)
        return super().items()


def test_state_dict_does_not_scan_all_entries_per_wrapper():
    """Two hundred wrapped layers: entries visited stay near the number of entries."""
    model = nn.Sequential(*[ckpt_wrap.checkpoint_wrapper(nn.Linear(1, 1)) for _ in range(200)])
    Counting.visited = 0
    state = model.state_dict(destination=Counting())
    assert Counting.visited <= 5 * 400
    assert len(state) == 400
