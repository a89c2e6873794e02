"""Waits, events, records and locks of mod-tracker."""

from __future__ import annotations

from ._part import NO_LOCK, Part

ATTRIBUTION = "mod-tracker/src/mod_tracker/_attribution.py"
CLOCKS = "mod-tracker/src/mod_tracker/reports/_device_time.py"
WATCH = "mod-tracker/src/mod_tracker/reports/_operator_watch.py"

MAKERS_TESTS = ("packages/mod-tracker/tests/test_makers.py",)
CLOCK_TESTS = ("packages/mod-tracker/tests/test_device_time.py",)
WATCH_TESTS = ("packages/mod-tracker/tests/test_operator_watch.py",)

GRAPH = "mod-tracker/src/mod_tracker/_torch_compat/_graph.py"
BACKWARD_TESTS = ("packages/mod-tracker/tests/test_backward.py",)

NAMES = "mod-tracker/src/mod_tracker/_names.py"
PATCH = "mod-tracker/src/mod_tracker/_call_patch.py"
TRACKER = "mod-tracker/src/mod_tracker/_tracker.py"
HOOKS = "mod-tracker/src/mod_tracker/_torch_compat/_saved_hooks.py"
LOCK, RLOCK = "threading.Lock()", "threading.RLock()"
NAMES_TESTS = ("packages/mod-tracker/tests/test_names.py",)
PATCH_TESTS = ("packages/mod-tracker/tests/test_call_patch.py",)
TRACKER_TESTS = ("packages/mod-tracker/tests/test_enter_and_leave.py",)
HOOKS_TESTS = ("packages/mod-tracker/tests/test_saved_hooks.py",)

PARTS = (
    Part(
        "nodes say which thread made them",
        ATTRIBUTION,
        "        # See Rule 6.\n",
        "        return state\n",
        MAKERS_TESTS,
    ),
    Part(
        "a module's device is read",
        CLOCKS,
        "self.use(tensor.device.index or 0)",
        "self.use(torch.accelerator.current_device_index())",
        CLOCK_TESTS,
    ),
    Part(
        "the host waits before it reads a clock",
        CLOCKS,
        "            torch.accelerator.synchronize(index)\n",
        "            pass\n",
        CLOCK_TESTS,
    ),
    Part(
        "a reading is on the module's stream",
        CLOCKS,
        "event.record(torch.accelerator.current_stream(device))",
        "event.record(torch.accelerator.current_stream())",
        CLOCK_TESTS,
    ),
    Part(
        "others wait while operators are unregistered",
        WATCH,
        "            _gate.wait()\n",
        "            pass\n",
        WATCH_TESTS,
    ),
    Part("a probe is waited for", GRAPH, "    thread.join()\n", "", BACKWARD_TESTS),
    Part(
        "unregistering waits for others",
        WATCH,
        "self._changed.wait(PATIENCE_S)",
        "False",
        WATCH_TESTS,
    ),
    Part(
        "others wait until it is over",
        WATCH,
        "self._changed.wait_for(lambda: self._owner is None, LIMIT_S)",
        "True",
        WATCH_TESTS,
    ),
    Part("lock of names", NAMES, RLOCK, NO_LOCK, NAMES_TESTS),
    Part("lock of the patch", PATCH, RLOCK, NO_LOCK, PATCH_TESTS),
    Part("lock of a tracker", TRACKER, LOCK, NO_LOCK, TRACKER_TESTS),
    Part("lock of hooks", HOOKS, RLOCK, NO_LOCK, HOOKS_TESTS),
    Part("lock of what is watched", WATCH, RLOCK, NO_LOCK, WATCH_TESTS),
)
