"""Waits, events, records and locks of flat-param."""

from __future__ import annotations

from ._part import Part

HOME = "flat-param/src/flat_param/memory/_home_stream.py"
MOVER = "flat-param/src/flat_param/offload/_mover.py"

PARTS = (
    Part(
        "home waits for what is around",
        HOME,
        "    stream.wait_stream(around)\n",
        "",
        tests=("packages/flat-param/tests/test_home_stream.py",),
    ),
    Part(
        "what is around waits for home",
        HOME,
        "        around.wait_stream(stream)\n",
        "",
        tests=("packages/flat-param/tests/test_home_stream.py",),
    ),
    Part(
        "current stream is put back",
        HOME,
        "        torch.accelerator.set_stream(around)\n",
        "",
        tests=("packages/flat-param/tests/test_home_stream.py",),
    ),
    Part(
        "current device is put back",
        HOME,
        "        torch.accelerator.set_device_index(device)\n",
        "",
        tests=("packages/flat-param/tests/test_home_stream.py",),
    ),
    Part(
        "state is stored after what computes",
        MOVER,
        "            stream.wait_event(after)\n",
        "            pass\n",
        tests=("packages/flat-param/tests/test_mover.py",),
    ),
    Part(
        "event of what computes",
        MOVER,
        "    event.record(torch.accelerator.current_stream(device))\n",
        "    event.record(torch.Stream(device))\n",
        tests=("packages/flat-param/tests/test_mover.py",),
    ),
    Part(
        "what was fetched is read before it goes",
        MOVER,
        "                event.synchronize()\n",
        "                pass\n",
        tests=("packages/flat-param/tests/test_mover.py",),
    ),
    Part(
        "the thread waits for its copies",
        MOVER,
        "            stream.synchronize()\n",
        "            pass\n",
        tests=("packages/flat-param/tests/test_mover.py",),
    ),
    Part(
        "one store after the other",
        MOVER,
        "        self.wait()\n        self._last",
        "        self._last",
        tests=("packages/flat-param/tests/test_mover.py",),
    ),
)
