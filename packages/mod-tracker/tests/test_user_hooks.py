"""The four hooks of the drop-in interface: one of a kind, all of a call or none."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mod_tracker import HookSlotError, ModTracker
from mod_tracker._listeners import Callbacks
from mod_tracker._user_hooks import KINDS, UserHooks


def test_hooks_registered_one_by_one_all_stay(x):
    """A second registration of another kind drops nothing."""
    tracker, kinds = ModTracker(), []
    tracker.register_user_hooks(pre_fw_hook=lambda *_: kinds.append("pre"))
    tracker.register_user_hooks(post_fw_hook=lambda *_: kinds.append("post"))
    with tracker:
        nn.ReLU()(x)
    assert kinds == ["pre", "post"]


class Events:
    """Stands for who listens: what is registered now, and how often."""

    def __init__(self):
        self.now, self.registered = [], 0

    def listen(self, callbacks):
        """Register; the function that is returned may be called again."""
        self.now.append(callbacks)
        self.registered += 1
        return lambda: self.now.remove(callbacks) if callbacks in self.now else None


def nothing(*_):
    """A hook that does nothing."""


@pytest.mark.parametrize("kind", KINDS)
def test_second_hook_of_a_kind_is_refused_in_torchs_words(kind):
    """Nothing of that call is registered, and what was there stays."""
    events = Events()
    hooks = UserHooks(events.listen)
    at = list(KINDS).index(kind)
    hooks.register([nothing if place == at else None for place in range(4)])
    before = list(events.now)
    with pytest.raises(HookSlotError) as caught:
        hooks.register([print] * 4)
    assert str(caught.value) == (
        f"mod_tracker.register_user_hooks: Only one {kind} can be registered at a time Clear the "
        "existing hook by calling ``clear_user_hooks`` before registering a new one"
    )
    assert isinstance(caught.value, AssertionError)
    assert events.now == before


@pytest.mark.parametrize(
    ("kind", "event"),
    [
        ("pre_fw_hook", "pre_hook"),
        ("post_fw_hook", "post_hook"),
        ("pre_bw_hook", "pre_backward"),
        ("post_bw_hook", "post_backward"),
    ],
)
def test_hook_is_a_listener_of_its_own_event(kind, event):
    """And of no other; its place is that of its name among the arguments."""
    events, tracker = Events(), ModTracker()
    tracker._user_hooks = UserHooks(events.listen)
    tracker.register_user_hooks(**{kind: nothing})
    assert events.now == [Callbacks(**{event: nothing})]


def test_no_hook_is_no_listener():
    """Calls cost nothing then, and every place is free."""
    events = Events()
    hooks = UserHooks(events.listen)
    hooks.register([None] * 4)
    assert events.registered == 0
    hooks.register([nothing] * 4)
    assert events.registered == 1


@pytest.mark.parametrize("count", [0, 3, 5])
def test_hooks_are_four(count):
    """Another number of places is a mistake, and registers nothing."""
    events = Events()
    with pytest.raises(ValueError, match="argument"):
        UserHooks(events.listen).register([nothing] * count)
    assert events.registered == 0


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


def test_clearing_leaves_subscriptions_alone(x):
    """They are others' places."""
    tracker, heard = ModTracker(), []
    tracker.subscribe(pre_forward=lambda *_: heard.append(1))
    tracker.register_user_hooks(pre_fw_hook=nothing)
    tracker.clear_user_hooks()
    with tracker:
        nn.ReLU()(x)
    assert heard == [1]


def test_clearing_that_is_interrupted_is_done_by_the_next():
    """Hooks that are still there are still known."""
    events, fails = Events(), [True]

    def listen(callbacks):
        remove = events.listen(callbacks)

        def interrupted():
            if fails:
                fails.pop()
                raise KeyboardInterrupt
            remove()

        return interrupted

    hooks = UserHooks(listen)
    hooks.register([nothing, None, None, None])
    hooks.register([None, nothing, None, None])
    with pytest.raises(KeyboardInterrupt):
        hooks.clear()
    assert events.now
    hooks.clear()
    assert events.now == []
    hooks.register([nothing] * 4)


def test_registering_that_is_interrupted_takes_no_place():
    """It can be done again."""

    def refuse(callbacks):
        raise KeyboardInterrupt

    hooks, events = UserHooks(refuse), Events()
    with pytest.raises(KeyboardInterrupt):
        hooks.register([nothing] * 4)
    hooks._listen = events.listen
    hooks.register([nothing] * 4)
    assert events.registered == 1


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


def test_trackers_have_places_of_their_own(x):
    """Two of them may have a hook of each kind."""
    first, second, told = ModTracker(), ModTracker(), []
    for name, tracker in (("first", first), ("second", second)):
        tracker.register_user_hooks(pre_fw_hook=lambda *_, name=name: told.append(name))
    with first, second:
        nn.ReLU()(x)
    assert sorted(told) == ["first", "second"]
