"""Listeners that fail: ours do not break the model, the drop-in's hooks raise, all leave clean."""

from __future__ import annotations

import gc
import io
import logging
import weakref

import pytest
import torch
from torch import nn

from mod_tracker import ModTracker

EVENTS = ("pre_forward", "post_forward", "pre_backward", "post_backward")
HOOKS = ("pre_fw_hook", "post_fw_hook", "pre_bw_hook", "post_bw_hook")


def fail_in(tracker, phase, error=ZeroDivisionError):
    """A callback that raises in one phase."""

    def fail(*_):
        if tracker.phase == phase:
            raise error

    return fail


def step(model, x):
    """One step; the gradient of the first weight."""
    model.zero_grad()
    model(x).sum().backward()
    return next(model.parameters()).grad


def cases():
    """Every event, in every phase in which it is told."""
    for event, hook in zip(EVENTS, HOOKS, strict=True):
        for phase in ("backward",) if "backward" in event else ("forward", "recompute"):
            yield event, hook, phase


@pytest.mark.parametrize(("event", "hook", "phase"), list(cases()))
def test_failing_listener_is_ended_and_the_model_goes_on(event, hook, phase, checkpointed, x):
    """Same gradient, no exception, the error kept, and the tracker clean."""
    model = checkpointed(use_reentrant=True)
    expected = step(model, x).clone()
    tracker, heard = ModTracker(), []
    tracker.subscribe(**{event: lambda call, *_: heard.append(tracker.phase)})
    with tracker:
        bad = tracker.subscribe(**{event: fail_in(tracker, phase)})
        assert torch.equal(step(model, x), expected)
        assert type(bad.error) is ZeroDivisionError
        assert tracker.parents == {"Global"}
    assert heard.count(phase) > 1


@pytest.mark.parametrize(("event", "hook", "phase"), list(cases()))
def test_failing_user_hook_raises_and_leaves_the_tracker_clean(event, hook, phase, checkpointed, x):
    """The hook's own exception reaches the caller; afterwards everything is told as before."""
    model = checkpointed(use_reentrant=True)
    tracker, heard = ModTracker(), []
    tracker.subscribe(**{event: lambda call, *_: heard.append((call.name, tracker.phase))})
    original = nn.Module.__call__
    with tracker:
        expected = step(model, x).clone()
        before = list(heard)
        tracker.register_user_hooks(**{hook: fail_in(tracker, phase)})
        with pytest.raises(ZeroDivisionError):
            step(model, x)
        assert (tracker.parents, tracker.phase) == ({"Global"}, "outside")
        tracker.clear_user_hooks()
        heard.clear()
        assert torch.equal(step(model, x), expected)
        assert heard == before
    assert nn.Module.__call__ is original


@pytest.mark.parametrize("phase", ["forward", "recompute", "backward"])
def test_interrupt_in_a_listener_goes_through(phase, checkpointed, x):
    """What is no `Exception` is not held back, and the tracker is clean."""
    tracker, model = ModTracker(), checkpointed(use_reentrant=True)
    interrupt = fail_in(tracker, phase, KeyboardInterrupt)
    with tracker:
        with (
            tracker.subscribe(pre_forward=interrupt, pre_backward=interrupt),
            pytest.raises(KeyboardInterrupt),
        ):
            step(model, x)
        assert tracker.parents == {"Global"}
        step(model, x)


def test_failing_switch_listener_is_ended(mlp, x):
    """`on_switch` has the same rule."""
    with ModTracker() as tracker:
        bad = tracker.on_switch(lambda call, phase: 1 / 0)
        step(mlp, x)
        assert type(bad.error) is ZeroDivisionError
        assert tracker.parents == {"Global"}


def test_error_is_logged_with_its_traceback_and_keeps_no_tensor(monkeypatch, mlp):
    """One record, whatever the number of calls; the input dies by reference count."""
    log, text, x = logging.getLogger("mod_tracker"), io.StringIO(), torch.randn(2, 4)
    handler, alive = logging.StreamHandler(text), weakref.ref(x)
    monkeypatch.setattr(log, "propagate", False)
    log.addHandler(handler)
    gc.disable()
    try:
        with ModTracker() as tracker:
            bad = tracker.subscribe(pre_forward=lambda call, args, kwargs: 1 / 0)
            step(mlp, x)
            step(mlp, x)
        assert text.getvalue().count("a listener failed and is not called again") == 1
        assert text.getvalue().count("Traceback") == 1
        assert bad.error is not None
        del x
        assert alive() is None
    finally:
        gc.enable()
        log.removeHandler(handler)
