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


@mutant(area=AREA, kills={"SP-178", "SP-200", "SP-201", "SP-206", "SP-207", "SP-208"})
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


@mutant(area=AREA, kills={"SP-206"})
def what_is_asked_for_belongs_to_the_current_stream(part):
    """Takes memory for what is asked for ahead on the stream that is current then."""

    def bring_back(self):
        with _moved.own_work():
            _, into = _moved._streams_of(self.home)
            back = torch.empty_like(self.host, device=self.home)
            into.wait_stream(self._stream)
            with _moved._On(into):
                back.copy_(self.host, non_blocking=True)
            self._back, self._arrived = back, into.record_event()
        _moved.counters.copies_in += 1

    _moved.MovedTensor._bring_back = bring_back
    return part


@mutant(area=AREA, kills={"SP-200", "SP-207"})
def values_are_brought_back_for_each_read(part):
    """Forgets what was asked for when it is read."""
    real = _moved.MovedTensor.value

    def value(self):
        if not self._here and self._back is not None:
            _, into = _moved._streams_of(self.home)
            self._wait_to_free(self._back, self._arrived, into, self._back_captured)
            self._back = self._arrived = None
        return real(self)

    _moved.MovedTensor.value = value
    return part


@mutant(area=AREA, kills={"SP-200", "SP-208"})
def values_stay_until_the_host_sees_them_copied(part):
    """Waits with letting go for the host, which is far ahead."""
    _moved.Leaving._settle = lambda self, held_bytes: None
    return part
