"""Offloaded values that nobody waits for; each fails what it declares, on the simulated device.

They change the package itself, so each needs a process of its own (`tests/test_broken_order.py`).
"""

from __future__ import annotations

import torch

from sac_policies.engines.contexts import _kept, _moved, _moved_stats, _regions
from torchparts_conformance.mutants import mutant

AREA = "sac-policies"


@mutant(area=AREA, kills={"SP-178"})
def hooks_are_handed_bytes_on_their_way(part):
    """Lets the copy to the host be late, whoever reads it next."""

    def to_host(tensor):
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    _kept._to_host = to_host
    return part


@mutant(area=AREA, kills={"SP-178", "SP-200"})
def readers_do_not_wait(part):
    """Hands out what was asked for before the bytes are back."""
    real = _moved.MovedTensor.value

    def value(self):
        back = self._back
        if back is None:
            return real(self)
        self._back = self._arrived = None
        return back

    _moved.MovedTensor.value = value
    return part


@mutant(area=AREA, kills={"SP-200"})
def values_are_asked_for_when_they_are_read(part):
    """Begins each copy back where backward stands and waits for it."""
    _regions.Region.ask_for_values = lambda self, unread: None
    return part


@mutant(area=AREA, kills={"SP-201"})
def the_limit_is_of_each_value(part):
    """Compares a value with the limit, and forgets what is away already."""
    counters = _moved_stats.counters

    def has_room(self, nbytes):
        fits = self.limit is None or nbytes <= self.limit
        self.kept += not fits
        return fits

    type(counters).has_room = has_room
    return part
