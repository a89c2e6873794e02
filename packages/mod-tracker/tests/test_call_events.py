"""A call with events: what the module or a listener raises goes on, and the next call is clean."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
import torch
from torch import nn

from mod_tracker import ModTracker


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


def test_failed_forward_leaves_nothing_behind(x, log_events):
    """After an exception and a retry each module has exactly one backward."""
    model = nn.Sequential(Failing(ValueError("once")))
    tracker = ModTracker()
    events = log_events(tracker)
    with tracker:
        with pytest.raises(ValueError, match="once"):
            model(x)
        assert tracker.parents == {"Global"}
        assert events[-2:] == ["-fw Sequential.0", "-fw Sequential"]
        model[0].error = None
        model(x).sum().backward()
    assert Counter(e for e in events if "bw" in e) == {
        f"{sign}bw {name}": 1
        for sign in "+-"
        for name in ("Sequential", "Sequential.0", "Sequential.0.a")
    }


def test_keyboard_interrupt_leaves_nothing_behind(x):
    """An exception that is not an `Exception` leaves the next call clean."""
    model, after = nn.Sequential(Failing(KeyboardInterrupt())), nn.Linear(4, 4)
    tracker, stacks = ModTracker(), []
    tracker.subscribe(pre_forward=lambda *_: stacks.append(tracker.stack), include="Linear")
    with tracker:
        with pytest.raises(KeyboardInterrupt):
            model(x)
        after(x)
    assert stacks == [("Linear",)]
    assert tracker.parents == {"Global"}


class FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("in backward")


class Fails(nn.Module):
    def forward(self, x):
        return FailingBackward.apply(x)


def test_failed_backward_leaves_nothing_behind(x, log_ops, log_events):
    """After an error in backward the next forward and backward are clean."""
    model = nn.Sequential(nn.Linear(4, 4), Fails(), nn.Linear(4, 4))
    tracker = ModTracker()
    events = log_events(tracker)
    with tracker:
        with pytest.raises(ValueError, match="in backward"):
            model(x).sum().backward()
        assert tracker.parents == {"Global"}
        assert tracker.phase == "outside"
    after = nn.Linear(4, 4, bias=False)
    events.clear()
    assert [e[2] for e in log_ops(tracker, lambda: after(x).sum().backward())] == [("Linear",)] * 3
    assert events == ["+fw Linear", "-fw Linear", "+bw Linear", "-bw Linear"]


def test_failing_hook_in_backward_leaves_nothing_behind(x):
    """A hook's own exception reaches the caller of backward, and nothing else changes."""
    tracker, model = ModTracker(), nn.Linear(4, 4)

    def bad(module, grads):
        raise ZeroDivisionError

    tracker.register_user_hooks(pre_bw_hook=bad)
    with tracker:
        with pytest.raises(ZeroDivisionError):
            model(x).sum().backward()
        tracker.clear_user_hooks()
        assert tracker.parents == {"Global"}
        model(x).sum().backward()
        assert tracker.parents == {"Global"}


def test_foreign_hook_that_raises_is_the_only_error(mlp, x):
    """Another global hook's exception arrives unchanged and without a warning."""

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


def listening(tracker, heard, **filters):
    """A subscription that writes down entries, and exits with their outputs."""
    return tracker.subscribe(
        pre_forward=lambda call, args, kwargs: heard.append(("+", call.name)),
        post_forward=lambda call, args, kwargs, output: heard.append(("-", call.name, output)),
        **filters,
    )


def fail(*_):
    """A hook that raises."""
    raise ZeroDivisionError


def test_listener_told_of_the_entry_is_told_of_the_exit_where_a_hook_stops_the_call(x):
    """The drop-in's hook raises after it: the call has failed, so its output is None."""
    tracker, heard, called = ModTracker(), [], []
    listening(tracker, heard)
    tracker.register_user_hooks(pre_fw_hook=fail, post_fw_hook=lambda *_: called.append(1))
    with tracker, pytest.raises(ZeroDivisionError):
        nn.ReLU()(x)
    assert heard == [("+", "ReLU"), ("-", "ReLU", None)]
    assert called == []
