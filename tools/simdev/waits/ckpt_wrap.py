"""Waits, events, records and locks of ckpt-wrap."""

from __future__ import annotations

from ._part import NO_LOCK, Part

TIER = "ckpt-wrap/src/ckpt_wrap/offload/_host_tier.py"
ORDER = "ckpt-wrap/src/ckpt_wrap/offload/_offload_scheduler.py"
STORAGE = "ckpt-wrap/src/ckpt_wrap/offload/_offloaded_storage.py"

TIER_TESTS = ("packages/ckpt-wrap/tests/test_host_tier_devices.py",)
OFFLOAD_TESTS = ("packages/ckpt-wrap/tests/test_offload_devices.py",)
CAPTURED_TESTS = ("packages/ckpt-wrap/tests/test_captured_devices.py",)
ORDER_TESTS = ("packages/ckpt-wrap/tests/test_offload_scheduler.py",)


PARTS = (
    Part("copy out waits", TIER, "        out.wait_stream(stream)\n", "", TIER_TESTS),
    Part(
        "source is recorded",
        TIER,
        "        source.record_stream(stream)  # Rule 4\n",
        "",
        OFFLOAD_TESTS,
    ),
    Part("copy in waits", TIER, "        into.wait_stream(out.stream)\n", "", TIER_TESTS),
    Part(
        "fetched memory is the storage's stream's",
        TIER,
        "        with _On(out.stream):\n            flat =",
        "        if True:\n            flat =",
        TIER_TESTS,
    ),
    Part("reader waits", TIER, "        current.wait_event(self.ended)\n", "", TIER_TESTS),
    Part(
        "reader waits on its own device",
        TIER,
        "current_stream(self.stream.device)\n        current.wait",
        "current_stream()\n        current.wait",
        OFFLOAD_TESTS,
    ),
    Part(
        "fetched tensor is recorded",
        TIER,
        "            self.tensor.record_stream(current)  # Rule 4\n",
        "            pass\n",
        TIER_TESTS,
    ),
    Part(
        "other streams' waits are no wait of the owner",
        TIER,
        "        if current == self.stream:\n",
        "        if True:\n",
        TIER_TESTS,
    ),
    Part(
        "owner waits",
        TIER,
        "            self.stream.wait_event(self.ended)\n",
        "            pass\n",
        TIER_TESTS,
    ),
    Part(
        "a copy says when it is done", TIER, "return self.ended.query()", "return True", TIER_TESTS
    ),
    Part(
        "event after a copy out",
        TIER,
        "StreamCopy(source, host, stream, out.record_event(), out)",
        "StreamCopy(source, host, stream, stream.record_event(), out)",
        TIER_TESTS,
    ),
    Part(
        "event after a copy in",
        TIER,
        "out.stream, into.record_event(), into)",
        "out.stream, out.stream.record_event(), into)",
        TIER_TESTS,
    ),
    Part(
        "current stream is put back",
        TIER,
        "        torch.accelerator.set_stream(self._before)\n",
        "",
        TIER_TESTS,
    ),
    Part(
        "current device is put back",
        TIER,
        "        torch.accelerator.set_device_index(self._device)\n",
        "",
        TIER_TESTS,
    ),
    Part(
        "lock of an order",
        ORDER,
        "self.lock = threading.RLock()",
        f"self.lock = {NO_LOCK}",
        ORDER_TESTS,
    ),
    Part(
        "lock of the room",
        ORDER,
        "self._room = threading.RLock()",
        f"self._room = {NO_LOCK}",
        ORDER_TESTS,
    ),
    Part(
        "orders of a thread",
        ORDER,
        "threading.local()",
        "__import__('types').SimpleNamespace()",
        ORDER_TESTS,
    ),
    Part(
        "lock of a storage",
        STORAGE,
        "self._lock = threading.RLock()",
        f"self._lock = {NO_LOCK}",
        OFFLOAD_TESTS,
    ),
    Part("host memory is pinned", TIER, "uint8, pin_memory=True)", "uint8)", TIER_TESTS),
    Part(
        "what was fetched is waited for",
        TIER,
        "        self._back.wait()\n",
        "        pass\n",
        OFFLOAD_TESTS,
    ),
    Part(
        "a copy out is on its stream",
        TIER,
        "        with _On(out):\n",
        "        if True:\n",
        TIER_TESTS,
    ),
    Part(
        "a copy in is on its stream",
        TIER,
        "        with _On(into):\n",
        "        if True:\n",
        TIER_TESTS,
    ),
    Part(
        "a stream is made current",
        TIER,
        "        torch.accelerator.set_stream(self._stream)\n",
        "",
        TIER_TESTS,
    ),
    Part(
        "a storage waits for what was fetched",
        STORAGE,
        "            self.stored.wait_fetched()\n",
        "",
        OFFLOAD_TESTS,
    ),
    Part(
        "no event is asked for in a capture",
        TIER,
        "self._captured or captures_calls_on(self.stream.device) or is_capturing(self.stream)",
        "False",
        CAPTURED_TESTS,
    ),
    Part(
        "a captured call ends with its copies",
        ORDER,
        "if captured and captures_calls_on(device):",
        "if False:",
        CAPTURED_TESTS,
    ),
    Part(
        "of a copy of before the allocator is told",
        TIER,
        "            tensor.record_stream(self._by)  # Rule 6\n",
        "            pass\n",
        CAPTURED_TESTS,
    ),
    Part(
        "a stream is asked whether it is captured",
        TIER,
        "    with _On(stream):  # torch answers for the current one\n        return",
        "    if True:\n        return",
        CAPTURED_TESTS,
    ),
)
