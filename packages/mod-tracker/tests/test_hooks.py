"""The four hooks of `register_user_hooks`."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mod_tracker import HookSlotError, ModTracker

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
    """Every hook in each of its phases."""
    for hook in HOOKS:
        for phase in ("backward",) if "bw" in hook else ("forward", "recompute"):
            yield hook, phase


def heard_by(tracker, function):
    """Return name and phase of each operator's module during a function."""
    heard = []

    def note(module, *_):
        heard.append((tracker.current, tracker.phase))

    tracker.clear_user_hooks()
    tracker.register_user_hooks(note, note, note, note)
    function()
    tracker.clear_user_hooks()
    return heard


@pytest.mark.parametrize(("hook", "phase"), list(cases()))
def test_failing_hook_raises_and_leaves_the_tracker_clean(hook, phase, checkpointed, x):
    model = checkpointed(use_reentrant=True)
    tracker, original = ModTracker(), nn.Module.__call__
    with tracker:
        expected = step(model, x).clone()
        before = heard_by(tracker, lambda: step(model, x))
        tracker.register_user_hooks(**{hook: fail_in(tracker, phase)})
        with pytest.raises(ZeroDivisionError):
            step(model, x)
        assert (tracker.parents, tracker.phase) == ({"Global"}, "outside")
        tracker.clear_user_hooks()
        assert torch.equal(step(model, x), expected)
        assert heard_by(tracker, lambda: step(model, x)) == before
    assert nn.Module.__call__ is original


@pytest.mark.parametrize("phase", ["forward", "recompute", "backward"])
def test_interrupt_in_a_listener_goes_through(phase, checkpointed, x):
    tracker, model = ModTracker(), checkpointed(use_reentrant=True)
    interrupt = fail_in(tracker, phase, KeyboardInterrupt)
    with tracker:
        tracker.register_user_hooks(pre_fw_hook=interrupt, pre_bw_hook=interrupt)
        with pytest.raises(KeyboardInterrupt):
            step(model, x)
        assert tracker.parents == {"Global"}
        tracker.clear_user_hooks()
        step(model, x)


def nothing(*_):
    """A hook that does nothing."""


@pytest.mark.parametrize("kind", HOOKS)
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
