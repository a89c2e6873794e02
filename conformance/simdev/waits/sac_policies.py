"""Waits, events, records and locks of sac-policies."""

from __future__ import annotations

from ._part import NO_LOCK, Part

KEPT = "sac-policies/src/sac_policies/engines/contexts/_kept.py"
MOVED = "sac-policies/src/sac_policies/engines/contexts/_moved.py"

PARTS = (
    Part(
        "hooks get bytes that are there",
        KEPT,
        "host.copy_(tensor)",
        "host.copy_(tensor, non_blocking=True)",
    ),
    Part(
        "what hooks give is copied at once",
        KEPT,
        "copy=not last)",
        "copy=not last, non_blocking=True)",
    ),
    Part(
        "value is recorded", MOVED, "            tensor.record_stream(self._stream)  # Rule 3\n", ""
    ),
    Part("copy out waits", MOVED, "            out.wait_event(self._made)\n", ""),
    Part("copy in waits", MOVED, "            into.wait_stream(self._stream)\n", ""),
    Part(
        "owner waits for what is read",
        MOVED,
        "                self._stream.wait_event(ready)\n",
        "",
    ),
    Part("another reader waits", MOVED, "                current.wait_event(ready)\n", ""),
    Part(
        "what another stream reads is recorded",
        MOVED,
        "                value.record_stream(current)  # Rule 3\n",
        "",
    ),
    Part(
        "owner waits to free",
        MOVED,
        "            self._stream.wait_event(event)\n",
        "            pass\n",
    ),
    Part(
        "a value that is dropped waits",
        MOVED,
        "            self._wait_to_free(self._out)\n        if self._back",
        "            pass\n        if self._back",
    ),
    Part(
        "what nobody read waits",
        MOVED,
        "            self._wait_to_free(self._arrived)\n",
        "            pass\n",
    ),
    Part(
        "what is overwritten waits",
        MOVED,
        "            torch.accelerator.current_stream(self.home).wait_event(self._out)\n",
        "",
    ),
    Part(
        "fetched memory is the value's stream's",
        MOVED,
        "            with _On(self._stream):\n",
        "            if True:\n",
    ),
    Part(
        "event after a copy out",
        MOVED,
        "self._out = out.record_event()",
        "self._out = self._stream.record_event()",
    ),
    Part(
        "event after a copy in",
        MOVED,
        "back, into.record_event()",
        "back, self._stream.record_event()",
    ),
    Part(
        "current stream is put back",
        MOVED,
        "        torch.accelerator.set_stream(self._before)\n",
        "",
    ),
    Part("lock of a value", MOVED, "self._lock = threading.RLock()", f"self._lock = {NO_LOCK}"),
    Part("host memory is pinned", MOVED, ', device="cpu", pin_memory=True', ', device="cpu"'),
    Part(
        "a copy says when it is done",
        MOVED,
        "not self._here or self._out.query()",
        "True",
        tests=("packages/sac-policies/tests/test_moved.py",),
    ),
    Part(
        "what leaves is of a thread",
        MOVED,
        "class Leaving(threading.local)",
        "class Leaving",
        tests=("packages/sac-policies/tests/test_moved.py",),
    ),
    Part(
        "current device is put back",
        MOVED,
        "        torch.accelerator.set_device_index(self._device)\n",
        "",
        tests=("packages/sac-policies/tests/test_moved.py",),
    ),
)
