"""Waits, events, records and locks of sac-policies."""

from __future__ import annotations

from ._part import NO_LOCK, Part

KEPT = "sac-policies/src/sac_policies/engines/contexts/_kept.py"
MOVED = "sac-policies/src/sac_policies/engines/contexts/_moved.py"

OFFLOAD_TESTS = ("packages/sac-policies/tests/test_offload_devices.py",)
CAPTURED_TESTS = ("packages/sac-policies/tests/test_captured_devices.py",)
MOVED_TESTS = ("packages/sac-policies/tests/test_moved.py",)

PASSING = "sac-policies/src/sac_policies/engines/contexts/_passing.py"
REPLAY = "sac-policies/src/sac_policies/engines/recipe/_replay.py"
MEASURE = "sac-policies/src/sac_policies/budget/_measure.py"
TIMES = "sac-policies/src/sac_policies/budget/_times.py"
RECORD = "sac-policies/src/sac_policies/budget/_record.py"
PASSING_TESTS = ("packages/sac-policies/tests/test_passing.py",)
REPLAY_TESTS = ("packages/sac-policies/tests/test_replay.py",)
MEASURE_TESTS = ("packages/sac-policies/tests/test_measure.py",)
TIMES_TESTS = ("packages/sac-policies/tests/test_times.py",)
RECORD_TESTS = ("packages/sac-policies/tests/test_record.py",)


PARTS = (
    Part(
        "hooks get bytes that are there",
        KEPT,
        "host.copy_(tensor)",
        "host.copy_(tensor, non_blocking=True)",
        OFFLOAD_TESTS,
    ),
    Part(
        "what hooks give is copied at once",
        KEPT,
        "copy=not last)",
        "copy=not last, non_blocking=True)",
        OFFLOAD_TESTS,
    ),
    Part(
        "value is recorded",
        MOVED,
        "            tensor.record_stream(self._stream)  # Rule 3\n",
        "",
        OFFLOAD_TESTS,
    ),
    Part("copy out waits", MOVED, "            out.wait_event(self._made)\n", "", MOVED_TESTS),
    Part("copy in waits", MOVED, "            into.wait_stream(self._stream)\n", "", MOVED_TESTS),
    Part(
        "owner waits for what is read",
        MOVED,
        "                self._stream.wait_event(ready)\n",
        "",
        MOVED_TESTS,
    ),
    Part(
        "another reader waits",
        MOVED,
        "                current.wait_event(ready)\n",
        "",
        MOVED_TESTS,
    ),
    Part(
        "what another stream reads is recorded",
        MOVED,
        "                value.record_stream(current)  # Rule 3\n",
        "",
        MOVED_TESTS,
    ),
    Part(
        "owner waits to free",
        MOVED,
        "            self._stream.wait_event(event)\n",
        "            pass\n",
        MOVED_TESTS,
    ),
    Part(
        "a value that is dropped waits",
        MOVED,
        "            self._wait_to_free(self._guard, self._out, out, self._captured)\n        if",
        "            pass\n        if",
        MOVED_TESTS,
    ),
    Part(
        "what nobody read waits",
        MOVED,
        "            self._wait_to_free(self._back, self._arrived, into, self._back_captured)\n",
        "            pass\n",
        MOVED_TESTS,
    ),
    Part(
        "what is overwritten waits",
        MOVED,
        "            torch.accelerator.current_stream(self.home).wait_event(self._out)\n",
        "",
        MOVED_TESTS,
    ),
    Part(
        "fetched memory is the value's stream's",
        MOVED,
        "            with _On(self._stream):\n",
        "            if True:\n",
        MOVED_TESTS,
    ),
    Part(
        "event after a copy out",
        MOVED,
        "self._out = out.record_event()",
        "self._out = self._stream.record_event()",
        MOVED_TESTS,
    ),
    Part(
        "event after a copy in",
        MOVED,
        "back, into.record_event()",
        "back, self._stream.record_event()",
        MOVED_TESTS,
    ),
    Part(
        "current stream is put back",
        MOVED,
        "        torch.accelerator.set_stream(self._before)\n",
        "",
        MOVED_TESTS,
    ),
    Part(
        "lock of a value",
        MOVED,
        "self._lock = threading.RLock()",
        f"self._lock = {NO_LOCK}",
        MOVED_TESTS,
    ),
    Part(
        "host memory is pinned",
        MOVED,
        ', device="cpu", pin_memory=True',
        ', device="cpu"',
        MOVED_TESTS,
    ),
    Part(
        "a copy says when it is done",
        MOVED,
        "not self._here or self._has_ended(self._out, self._captured)",
        "True",
        MOVED_TESTS,
    ),
    Part(
        "what leaves is of a thread",
        MOVED,
        "class Leaving(threading.local)",
        "class Leaving",
        MOVED_TESTS,
    ),
    Part(
        "current device is put back",
        MOVED,
        "        torch.accelerator.set_device_index(self._device)\n",
        "",
        MOVED_TESTS,
    ),
    Part(
        "event of what made a value",
        MOVED,
        "self._made = self._stream.record_event()",
        "self._made = out.record_event()",
        MOVED_TESTS,
    ),
    Part("a copy out is on its stream", MOVED, "with _On(out):", "if True:", MOVED_TESTS),
    Part("a copy in is on its stream", MOVED, "with _On(into):", "if True:", MOVED_TESTS),
    Part(
        "what is let go of waits",
        MOVED,
        "                self._wait_to_free(self._guard, self._out, out, self._captured)\n"
        "                self._here",
        "                self._here",
        MOVED_TESTS,
    ),
    Part(
        "what was seen done is not waited for",
        MOVED,
        "        if self._has_ended(event, captured):\n            return\n        captures",
        "        captures",
        MOVED_TESTS,
    ),
    Part(
        "a stream is made current",
        MOVED,
        "        torch.accelerator.set_stream(self._stream)\n",
        "",
        MOVED_TESTS,
    ),
    Part(
        "lock of torch's handles",
        PASSING,
        "_lock = threading.RLock()",
        f"_lock = {NO_LOCK}",
        PASSING_TESTS,
    ),
    Part(
        "lock where a recomputation begins",
        PASSING,
        "    with _lock:\n        _recomputing.add",
        "    if True:\n        _recomputing.add",
        PASSING_TESTS,
    ),
    Part(
        "lock where a recomputation ends",
        PASSING,
        "    with _lock:\n        _recomputing.discard",
        "    if True:\n        _recomputing.discard",
        PASSING_TESTS,
    ),
    Part("a rule is tried to the end", REPLAY, "    thread.join()\n", "", REPLAY_TESTS),
    Part(
        "a step is clocked to its end",
        TIMES,
        "        getattr(torch, self._device.type).synchronize(self._device)\n",
        "",
        TIMES_TESTS,
    ),
    Part(
        "copies are timed to their end",
        MEASURE,
        "        torch.accelerator.synchronize(found)\n",
        "",
        MEASURE_TESTS,
    ),
    Part("an operator is timed to its end", RECORD, "        _wait(values)\n", "", RECORD_TESTS),
    Part(
        "a clock waits for the device",
        RECORD,
        "        getattr(torch, device.type).synchronize(device)\n",
        "        pass\n",
        RECORD_TESTS,
    ),
    Part(
        "no event is asked for in a capture",
        MOVED,
        "captured or _measured[0] or is_capturing(self.home) or _is_capturing(self._stream)",
        "_measured[0]",
        CAPTURED_TESTS,
    ),
    Part(
        "a captured region ends with its copies",
        MOVED,
        "0 if captures else self._values[-1][1]",
        "self._values[-1][1]",
        CAPTURED_TESTS,
    ),
    Part(
        "nothing is compared in a capture",
        "sac-policies/src/sac_policies/engines/_guards.py",
        "from ._capturing import is_capturing\n",
        "is_capturing = lambda device: False\n",
        CAPTURED_TESTS,
    ),
    Part("an event is asked", MOVED, "return event.query()", "return True", MOVED_TESTS),
    Part(
        "of a copy of before the allocator is told",
        MOVED,
        "                tensor.record_stream(by)  # Rule 7\n",
        "                pass\n",
        CAPTURED_TESTS,
    ),
    Part(
        "a stream is asked whether it is captured",
        MOVED,
        "    with _On(stream):  # torch answers for the current one\n        return",
        "    if True:\n        return",
        CAPTURED_TESTS,
    ),
)
