"""Calls with events: errors propagate, and the next call is unaffected."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mod_tracker import ModTracker, profile_time, trace


class Failing(nn.Module):
    def __init__(self, error):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.error = error

    def forward(self, x):
        y = self.a(x)
        if self.error is not None:
            raise self.error
        return y


def test_foreign_hook_that_raises_is_the_only_error(mlp, x):
    """The exception of another global hook propagates unchanged and without a warning."""

    def bad(module, args):
        raise ZeroDivisionError

    handle = nn.modules.module.register_module_forward_pre_hook(bad)
    try:
        with ModTracker() as tracker:
            with pytest.raises(ZeroDivisionError):
                mlp(x)
            assert tracker.parents == {"Global"}
    finally:
        handle.remove()


def fail(*_):
    """A hook that raises."""
    raise ZeroDivisionError


def test_hook_that_stops_a_call_has_no_exit(x):
    """The hook raises on entry, so the hook of the exit is not called."""
    tracker, called = ModTracker(), []
    tracker.register_user_hooks(pre_fw_hook=fail, post_fw_hook=lambda *_: called.append(1))
    with tracker, pytest.raises(ZeroDivisionError):
        nn.ReLU()(x)
    assert (called, tracker.stack) == ([], ())


def test_hooks_entered_before_an_interrupt_get_their_exit(x):
    tracker, heard = ModTracker(), []

    def stop(*_):
        raise KeyboardInterrupt

    with tracker:
        tracker.register_user_hooks(post_fw_hook=lambda *_: heard.append("exit"))
        tracker.register_user_hooks(pre_fw_hook=stop)
        with pytest.raises(KeyboardInterrupt):
            nn.ReLU()(x)
        assert (heard, tracker.stack) == (["exit"], ())


def test_failed_call_has_an_exit_without_output(x):
    tracker, seen = ModTracker(), []
    tracker.register_user_hooks(
        post_fw_hook=lambda module, args, output: seen.append((tracker.current, output is None))
    )
    with tracker, pytest.raises(ValueError, match="once"):
        nn.Sequential(Failing(ValueError("once")))(x)
    assert seen == [("Sequential.0.a", False), ("Sequential.0", True), ("Sequential", True)]


def slices(report):
    """Beginnings and ends of a trace, without repeating the phase."""
    marks = {"B": "+", "E": "-"}
    return [f"{marks[each['ph']]}{each['name']} {each['cat']}" for each in report.events]


def test_trace_of_a_failed_call_ends_where_it_began(x):
    with trace() as report, pytest.raises(KeyboardInterrupt):
        nn.Sequential(Failing(KeyboardInterrupt()))(x)
    names = ["Sequential", "Sequential.0", "Sequential.0.a"]
    begun = [f"+{name} forward" for name in names]
    assert slices(report) == [*begun, *(f"-{name} forward" for name in reversed(names))]


def test_code_after_a_backward_inside_a_forward_is_the_forward(x, clock):

    class Forces(nn.Module):
        def __init__(self):
            super().__init__()
            self.energy = nn.Linear(4, 1)

        def forward(self, x):
            energy = self.energy(x).sum()
            (grad,) = torch.autograd.grad(energy, x)
            clock.passes(7)
            return grad

    with profile_time() as report:
        Forces()(x)
    assert report["Forces"].self_forward == report.total == 7
