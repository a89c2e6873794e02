"""A KeyboardInterrupt at any call inside the package leaves everything whole."""

from __future__ import annotations

import functools
import os
import sys
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import nn
from torch.nn.modules import module as hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode

import mod_tracker
import mod_tracker._call_patch as entry
from mod_tracker import (
    ModTracker,
    ReportSchedule,
    profile_flops,
    profile_memory,
    profile_time,
    trace,
)

SOURCE = os.path.dirname(mod_tracker.__file__)


class Interrupt:
    """Raises where the n-th frame of the package begins to run, as the interpreter does.

    At its first instruction: there, and not at the call, a signal is handled, and the frame's own
    `try` around a `yield` sees it.
    """

    def __init__(self, at):
        self.at, self.frames, self.raised = at, 0, False

    def __enter__(self):
        self.before = sys.gettrace(), sys.unraisablehook
        # A finalizer that is interrupted tells this hook, and nobody else.
        sys.unraisablehook = lambda unraisable: None
        sys.settrace(self._call)

    def __exit__(self, *exc):
        sys.settrace(self.before[0])
        sys.unraisablehook = self.before[1]

    def _call(self, frame, event, arg):
        if not frame.f_code.co_filename.startswith(SOURCE):
            return None
        self.frames += 1
        if self.frames == self.at:
            frame.f_trace_opcodes = True
            frame.f_trace_lines = False
            return self._first
        return None

    def _first(self, frame, event, arg):
        if event == "opcode" and not self.raised:
            self.raised = True
            raise KeyboardInterrupt
        return self._first


def step(model, x):
    """One step; every gradient."""
    model.zero_grad()
    model(x).sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@contextmanager
def twice(tracker):
    """The tracker, left again: an interrupt as `__exit__` begins keeps it from doing anything."""
    try:
        with tracker:
            yield
    finally:
        tracker.__exit__(None, None, None)


@contextmanager
def listening():
    """A tracker to which everybody listens."""
    tracker = ModTracker()
    tracker.subscribe(
        pre_forward=lambda *_: None, post_forward=lambda *_: None, pre_backward=lambda *_: None
    )
    tracker.on_switch(lambda *_: None)
    tracker.register_user_hooks(post_bw_hook=lambda *_: None)
    with twice(tracker):
        yield tracker


def bare():
    """A tracker to which nobody listens."""
    return twice(ModTracker())


def scheduled():
    """A step of a schedule that measures all of them."""
    return ReportSchedule(profile_time, every_n_steps=1, on_report=lambda *_: None).step()


@contextmanager
def begun():
    """The same by its two ends, with the schedule around it, and left again as `twice` does."""
    schedule = ReportSchedule(profile_time, every_n_steps=1, on_report=lambda *_: None)
    try:
        with schedule:
            schedule.begin_step()
            yield
            schedule.end_step()
    finally:
        schedule.close()


SITUATIONS = {
    "bare": bare,
    "listening": listening,
    **{kind.__name__: kind for kind in (profile_flops, profile_time, profile_memory, trace)},
    "scheduled": scheduled,
    "begun": begun,
    "ranges": functools.partial(trace, ranges="record_function"),
}


def hooks_there():
    """The global hooks that are registered."""
    return len(hooks._global_forward_pre_hooks), len(hooks._global_forward_hooks)


def check(situation, model, x, expected, at):
    """Interrupt the `at`-th frame of a measured step; whether there is such a frame."""
    original, handles = nn.Module.__call__, hooks_there()
    interrupt = Interrupt(at)
    try:
        with interrupt, situation():
            step(model, x)
    except KeyboardInterrupt:
        pass
    assert nn.Module.__call__ is original, f"the patch is left after an interrupt at {at}"
    assert hooks_there() == handles, f"hooks are left after an interrupt at {at}"
    assert _get_current_dispatch_mode() is None
    assert entry._lock.acquire(blocking=False)
    entry._lock.release()
    for old, new in zip(expected, step(model, x), strict=True):
        assert torch.equal(old, new)
    return interrupt.raised


def places(count, every):
    """Frames to interrupt: all at the beginning, then some, in another order each time."""
    return sorted({*range(1, 30), *range(30, count, every), *range(max(30, count - 30), count + 1)})


def frames_of(situation, model, x):
    """How many frames of the package a measured step has."""
    interrupt = Interrupt(-1)
    with interrupt, situation():
        step(model, x)
    return interrupt.frames


@pytest.mark.parametrize("name", SITUATIONS)
def test_nothing_is_left_after_an_interrupt(name, checkpointed):
    """Class, hooks, modes and locks are as before, and the next step is the plain one."""
    situation, model = SITUATIONS[name], checkpointed(use_reentrant=True)
    x = torch.randn(2, 4, requires_grad=True)
    expected = step(model, x)
    count = frames_of(situation, model, x)
    raised = [check(situation, model, x, expected, at) for at in places(count, 7)]
    assert sum(raised) > 20


@pytest.mark.parametrize("listen", [False, True])
def test_a_tracker_goes_on_after_an_interrupt(listen, checkpointed):
    """Still entered, it is nowhere, holds no names of calls that ended, and tells all of a step."""
    model, x = checkpointed(use_reentrant=True), torch.randn(2, 4, requires_grad=True)
    plain, log = step(model, x), []

    def notified(tracker):
        return tracker.subscribe(
            pre_forward=lambda call, *_: log.append(call.stack),
            post_backward=lambda call, *_: log.append((call.name, tracker.phase)),
        )

    with ModTracker(model) as tracker, notified(tracker):
        step(model, x)
        expected, count = list(log), 10**9
        at = 1
        while at < count:
            with notified(tracker) if listen else nullcontext():
                interrupt = Interrupt(at)
                try:
                    with interrupt:
                        step(model, x)
                except KeyboardInterrupt:
                    pass
                if not interrupt.raised:
                    break
                assert (tracker.stack, tracker.phase) == ((), "outside"), at
            log.clear()
            found = step(model, x)
            assert log == expected, at
            assert all(torch.equal(old, new) for old, new in zip(plain, found, strict=True))
            at += 1 if at < 40 else 5
    assert at > 30
