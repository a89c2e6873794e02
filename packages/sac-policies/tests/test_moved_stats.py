"""Counts of offloaded values."""

from __future__ import annotations

import sac_policies as sp
from sac_policies.eager._moved_stats import Counters


def test_bytes_are_away_until_they_are_gone():
    """A number that never left is no error: a finalizer may come where nothing had begun."""
    made = Counters()
    number = made.out(64)
    assert (made.copies_out, made.bytes_out, made.bytes_away) == (1, 64, 64)
    made.gone(number)
    made.gone(number)
    made.gone(-1)
    assert made.bytes_away == 0


def test_stats_are_a_value():
    """Of this process; nothing moves on a CPU."""
    assert isinstance(sp.offload_stats(), sp.reports.OffloadStats)
    assert sp.offload_stats() == sp.offload_stats()
