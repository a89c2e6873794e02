"""What `taken_out.py` takes out of the packages, one at a time."""

from __future__ import annotations

from typing import NamedTuple


class Part(NamedTuple):
    """What is taken out.

    Args:
        name: by which it is asked for.
        file: in `packages`.
        old: the text, which is there once.
        new: what stands there instead.
        unnoticed: why no test can notice; empty where one has to.
        tests: files that are run in the place of all that are marked, from the root.
    """

    name: str
    file: str
    old: str
    new: str
    unnoticed: str = ""
    tests: tuple[str, ...] = ()

    @property
    def package(self) -> str:
        """The folder of its package."""
        return self.file.partition("/")[0]


TIER = "ckpt-wrap/src/ckpt_wrap/offload/_host_tier.py"
ORDER = "ckpt-wrap/src/ckpt_wrap/offload/_offload_scheduler.py"
STORAGE = "ckpt-wrap/src/ckpt_wrap/offload/_offloaded_storage.py"
KEPT = "sac-policies/src/sac_policies/engines/contexts/_kept.py"
MOVED = "sac-policies/src/sac_policies/engines/contexts/_moved.py"
ATTRIBUTION = "mod-tracker/src/mod_tracker/_attribution.py"
CLOCKS = "mod-tracker/src/mod_tracker/reports/_device_time.py"
WATCH = "mod-tracker/src/mod_tracker/reports/_operator_watch.py"
HOME = "flat-param/src/flat_param/memory/_home_stream.py"
MOVER = "flat-param/src/flat_param/offload/_mover.py"
NO_LOCK = "__import__('contextlib').nullcontext()"

PARTS = (
    Part("copy out waits", TIER, "        out.wait_stream(stream)\n", ""),
    Part("source is recorded", TIER, "        source.record_stream(stream)  # Rule 4\n", ""),
    Part("copy in waits", TIER, "        into.wait_stream(out.stream)\n", ""),
    Part(
        "fetched memory is the storage's stream's",
        TIER,
        "        with _On(out.stream):\n            flat =",
        "        if True:\n            flat =",
    ),
    Part("reader waits", TIER, "        current.wait_event(self.ended)\n", ""),
    Part(
        "reader waits on its own device",
        TIER,
        "current_stream(self.stream.device)\n        current.wait",
        "current_stream()\n        current.wait",
    ),
    Part(
        "fetched tensor is recorded",
        TIER,
        "            self.tensor.record_stream(current)  # Rule 4\n",
        "            pass\n",
    ),
    Part(
        "other streams' waits are no wait of the owner",
        TIER,
        "        if current == self.stream:\n",
        "        if True:\n",
    ),
    Part(
        "owner waits",
        TIER,
        "            self.stream.wait_event(self.ended)\n",
        "            pass\n",
    ),
    Part("a copy says when it is done", TIER, "return self.ended.query()", "return True"),
    Part(
        "event after a copy out",
        TIER,
        "StreamCopy(source, host, stream, out.record_event())",
        "StreamCopy(source, host, stream, stream.record_event())",
    ),
    Part(
        "event after a copy in",
        TIER,
        "out.stream, into.record_event())",
        "out.stream, out.stream.record_event())",
    ),
    Part(
        "current stream is put back",
        TIER,
        "        torch.accelerator.set_stream(self._before)\n",
        "",
    ),
    Part(
        "current device is put back",
        TIER,
        "        torch.accelerator.set_device_index(self._device)\n",
        "",
    ),
    Part("lock of an order", ORDER, "self.lock = threading.RLock()", f"self.lock = {NO_LOCK}"),
    Part("lock of the room", ORDER, "self._room = threading.RLock()", f"self._room = {NO_LOCK}"),
    Part("orders of a thread", ORDER, "threading.local()", "__import__('types').SimpleNamespace()"),
    Part("lock of a storage", STORAGE, "self._lock = threading.RLock()", f"self._lock = {NO_LOCK}"),
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
    Part(
        "host memory is pinned",
        TIER,
        "uint8, pin_memory=True)",
        "uint8)",
        tests=("packages/ckpt-wrap/tests/test_host_tier_devices.py",),
    ),
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
