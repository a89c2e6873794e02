"""Times that are read of another clock; each fails what it declares, on simdev.

They change the package itself, so each needs a process of its own (`tests/test_broken_order.py`).
"""

from __future__ import annotations

import torch

from mod_tracker.reports import _device_time
from torchparts_conformance.mutants import mutant

AREA = "mod-tracker"


@mutant(area=AREA, kills={"MT-431"})
def time_is_told_of_the_current_device(part):
    """Reads the clock of whichever device is current."""

    def read(self, index, call, phase):
        here = torch.accelerator.current_stream()
        event = torch.Event(here.device, enable_timing=True)
        event.record(here)
        self._readings[index].append((event, call, phase))

    _device_time.DeviceTimelines._read = read
    return part
