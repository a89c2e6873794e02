"""Subscriptions, whose errors do not reach the model, and the four drop-in hooks."""

from __future__ import annotations

import gc
import io
import logging
import weakref

import pytest
import torch
from torch import nn

from mod_tracker import HookSlotError, ModTracker

EVENTS = ("pre_forward", "post_forward", "pre_backward", "post_backward")


HOOKS = ("pre_fw_hook", "post_fw_hook", "pre_bw_hook", "post_bw_hook")


def fail_in(tracker, phase, error=ZeroDivisionError):
    """A callback that raises in one phase."""

    def fail(*_):
        if tracker.phase == phase:
            raise error

    return fail


def step(model, x):
    """Run one step and return the gradient of the first weight."""
    model.zero_grad()
    model(x).sum().backward()
    return next(model.parameters()).grad


def cases():
    """Every event in each of its phases."""
    for event, hook in zip(EVENTS, HOOKS, strict=True):
        for phase in ("backward",) if "backward" in event else ("forward", "recompute"):
            yield event, hook, phase


@pytest.mark.parametrize(("event", "hook", "phase"), list(cases()))
def test_failing_listener_is_removed_and_the_model_continues(event, hook, phase, checkpointed, x):
    """Same gradient, no exception, the error is stored, and the tracker's state is clean."""
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
    """As for the other callbacks."""
    with ModTracker() as tracker:
        bad = tracker.subscribe(switched=lambda call, phase: 1 / 0)
        step(mlp, x)
        assert type(bad.error) is ZeroDivisionError
        assert tracker.parents == {"Global"}


def test_error_is_logged_with_its_traceback_and_keeps_no_tensor(monkeypatch, mlp):
    """One log record for any number of calls; the input is freed by reference count."""
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


KINDS = ("pre_fw_hook", "post_fw_hook", "pre_bw_hook", "post_bw_hook")


def nothing(*_):
    """A hook that does nothing."""


@pytest.mark.parametrize("kind", KINDS)
def test_second_hook_of_a_kind_is_refused_in_torchs_words(kind, x):
    tracker, heard = ModTracker(), []
    tracker.register_user_hooks(**{kind: lambda *_: heard.append(kind)})
    with pytest.raises(HookSlotError) as caught:
        tracker.register_user_hooks(*[lambda *_: heard.append("new")] * 4)
    assert str(caught.value) == (
        f"mod_tracker.register_user_hooks: Only one {kind} can be registered at a time Clear the "
        "existing hook by calling ``clear_user_hooks`` before registering a new one"
    )
    assert isinstance(caught.value, AssertionError)
    with tracker:
        nn.Tanh()(x).sum().backward()
    assert heard == [kind]


def test_hook_that_is_false_is_a_hook():
    """A callable object may be falsy, such as an empty list subclass."""

    class Collects(list):
        def __call__(self, *values):
            self.append(len(values))

    tracker, hook = ModTracker(), Collects()
    tracker.register_user_hooks(pre_fw_hook=hook)
    with pytest.raises(HookSlotError):
        tracker.register_user_hooks(pre_fw_hook=nothing)
    with tracker:
        nn.ReLU()(torch.ones(1))
    assert hook == [2]


def test_cleared_places_are_free_again(x):
    """After `clear_user_hooks` each hook can be registered again; clearing none is allowed."""
    tracker, kinds = ModTracker(), []
    tracker.clear_user_hooks()
    tracker.register_user_hooks(pre_fw_hook=lambda *_: kinds.append("old"))
    tracker.register_user_hooks(post_bw_hook=lambda *_: kinds.append("old"))
    tracker.clear_user_hooks()
    tracker.clear_user_hooks()
    tracker.register_user_hooks(post_fw_hook=lambda *_: kinds.append("new"), pre_fw_hook=nothing)
    with tracker:
        nn.Tanh()(x).sum().backward()
    assert kinds == ["new"]


def test_hooks_get_the_arguments_of_torchs_hooks(x):
    """The module, no keyword arguments, and a tuple of gradients in backward."""
    tracker, given, model = ModTracker(), [], nn.Linear(4, 3)
    tracker.register_user_hooks(*[lambda *values: given.append(values)] * 4)
    y = x * 1
    with tracker:
        output = model(input=y)
        output.sum().backward()
    assert [values[0] for values in given] == [model] * 4
    assert given[0][1:] == ((),)
    assert given[1][1] == ()
    assert given[1][2] is output
    assert [tuple(grads[0].shape) for _, grads in given[2:]] == [(2, 3), (2, 4)]


def test_hook_may_clear_and_register_inside_a_call(x):
    tracker, told = ModTracker(), []

    def change(*_):
        tracker.clear_user_hooks()
        tracker.register_user_hooks(post_fw_hook=lambda *_: told.append("new"))

    tracker.register_user_hooks(pre_fw_hook=change, post_fw_hook=lambda *_: told.append("old"))
    with tracker:
        nn.ReLU()(x)
        nn.ReLU()(x)
    assert told == ["old", "new"]
