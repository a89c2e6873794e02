"""Waits, events, records and locks of flat-param."""

from __future__ import annotations

from ._part import Part

HOME = "flat-param/src/flat_param/memory/_home_stream.py"
MOVER = "flat-param/src/flat_param/offload/_mover.py"

HOME_TESTS = ("packages/flat-param/tests/test_home_stream.py",)
MOVER_TESTS = ("packages/flat-param/tests/test_mover.py",)

BUCKETS = "flat-param/src/flat_param/offload/_buckets.py"
BUCKETS_TESTS = ("packages/flat-param/tests/test_buckets.py",)


PARTS = (
    Part("home waits for what is around", HOME, "    stream.wait_stream(around)\n", "", HOME_TESTS),
    Part(
        "what is around waits for home",
        HOME,
        "        around.wait_stream(stream)\n",
        "",
        HOME_TESTS,
    ),
    Part(
        "current stream is put back",
        HOME,
        "        torch.accelerator.set_stream(around)\n",
        "",
        HOME_TESTS,
    ),
    Part(
        "current device is put back",
        HOME,
        "        torch.accelerator.set_device_index(device)\n",
        "",
        HOME_TESTS,
    ),
    Part(
        "state is stored after what computes",
        MOVER,
        "            stream.wait_event(after)\n",
        "            pass\n",
        MOVER_TESTS,
    ),
    Part(
        "event of what computes",
        MOVER,
        "    event.record(torch.accelerator.current_stream(device))\n",
        "    event.record(torch.Stream(device))\n",
        MOVER_TESTS,
    ),
    Part(
        "what was fetched is read before it goes",
        MOVER,
        "                event.synchronize()\n",
        "                pass\n",
        MOVER_TESTS,
    ),
    Part(
        "the thread waits for its copies",
        MOVER,
        "            stream.synchronize()\n",
        "            pass\n",
        MOVER_TESTS,
    ),
    Part(
        "one store after the other",
        MOVER,
        "        self.wait()\n        self._last",
        "        self._last",
        MOVER_TESTS,
    ),
    Part(
        "home is made current",
        HOME,
        "    torch.accelerator.set_stream(stream)\n",
        "",
        HOME_TESTS,
    ),
    Part(
        "the end of a step waits for the thread",
        MOVER,
        "shutdown(wait=True,",
        "shutdown(wait=False,",
        MOVER_TESTS,
    ),
    Part(
        "a fetch is on a stream of its own",
        MOVER,
        "with self._on_stream(device):",
        "with nullcontext():",
        MOVER_TESTS,
    ),
    Part(
        "a fetch is waited for",
        MOVER,
        "            self._wait()\n            self._tier.settle(stored)\n            return out",
        "            self._tier.settle(stored)\n            return out",
        MOVER_TESTS,
    ),
    Part(
        "a store is on a stream of its own",
        MOVER,
        "with self._on_stream(value.device, done.get(value.device)):",
        "with nullcontext():",
        MOVER_TESTS,
    ),
    Part(
        "a store is waited for",
        MOVER,
        "                self._wait()\n            for event",
        "            for event",
        MOVER_TESTS,
    ),
    Part(
        "what failed is told",
        MOVER,
        "            last.result()\n",
        "            pass\n",
        MOVER_TESTS,
    ),
    Part("a step waits for its state", BUCKETS, "arrived.wait()", "[]", BUCKETS_TESTS),
    Part(
        "a step waits for the last store",
        BUCKETS,
        "        mover.wait()\n",
        "",
        BUCKETS_TESTS,
    ),
)
