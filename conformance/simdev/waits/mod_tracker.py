"""Waits, events, records and locks of mod-tracker."""

from __future__ import annotations

from ._part import Part

ATTRIBUTION = "mod-tracker/src/mod_tracker/_attribution.py"
CLOCKS = "mod-tracker/src/mod_tracker/reports/_device_time.py"
WATCH = "mod-tracker/src/mod_tracker/reports/_operator_watch.py"

PARTS = (
    Part(
        "nodes say which thread made them",
        ATTRIBUTION,
        "        # See Rule 6.\n",
        "        return state\n",
    ),
    Part(
        "a module's device is read",
        CLOCKS,
        "self.use(tensor.device.index or 0)",
        "self.use(torch.accelerator.current_device_index())",
    ),
    Part(
        "the host waits before it reads a clock",
        CLOCKS,
        "            torch.accelerator.synchronize(index)\n",
        "            pass\n",
        tests=("packages/mod-tracker/tests/test_device_time.py",),
    ),
    Part(
        "a reading is on the module's stream",
        CLOCKS,
        "event.record(torch.accelerator.current_stream(device))",
        "event.record(torch.accelerator.current_stream())",
        tests=("packages/mod-tracker/tests/test_device_time.py",),
    ),
    Part(
        "others wait while operators are unregistered",
        WATCH,
        "    place.knowing = (_gate.wait,)\n",
        "",
        tests=("packages/mod-tracker/tests/test_operator_watch.py",),
    ),
)
