"""The four hooks of the drop-in interface: one of a kind, all of a call or none."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mod_tracker import HookSlotError, ModTracker

KINDS = ("pre_fw_hook", "post_fw_hook", "pre_bw_hook", "post_bw_hook")


def nothing(*_):
    """A hook that does nothing."""


@pytest.mark.parametrize("kind", KINDS)
def test_second_hook_of_a_kind_is_refused_in_torchs_words(kind, x):
    """Nothing of that call is registered, and what was there stays."""
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
    """A callable object may be empty, as a list is."""

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
    """All of them, however they were taken; clearing none is nothing."""
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


def test_hooks_get_what_torchs_get(x):
    """The module, and no keyword arguments; what backward hooks get is a tuple of gradients."""
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
    """What was told of the entry hears of the exit; the new one hears of the next call."""
    tracker, told = ModTracker(), []

    def change(*_):
        tracker.clear_user_hooks()
        tracker.register_user_hooks(post_fw_hook=lambda *_: told.append("new"))

    tracker.register_user_hooks(pre_fw_hook=change, post_fw_hook=lambda *_: told.append("old"))
    with tracker:
        nn.ReLU()(x)
        nn.ReLU()(x)
    assert told == ["old", "new"]
