"""The patch of nn.Module.__call__: foreign patches, nesting, the fallback."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import mod_tracker._call_patch as entry
from mod_tracker import ModTracker


@pytest.fixture(autouse=True)
def _nothing_is_left():
    """Whatever a test does, the original `__call__` is in place afterwards."""
    original = nn.Module.__call__
    yield
    assert nn.Module.__call__ is original


def foreign(below):
    """A patch that somebody else makes."""

    def call(self, *args, **kwargs):
        return below(self, *args, **kwargs)

    return call


def test_foreign_patch_made_inside_stays_and_is_not_undone(x):
    """A patch made over ours survives our exit; when it goes, so does what is left of ours."""
    original, seen = nn.Module.__call__, []
    tracker = ModTracker()
    tracker.subscribe(pre_forward=lambda call, *_: seen.append(call.name))
    tracker.__enter__()
    ours = nn.Module.__call__
    theirs = nn.Module.__call__ = foreign(ours)
    nn.Linear(4, 4)(x)
    tracker.__exit__(None, None, None)
    assert nn.Module.__call__ is theirs
    nn.ReLU()(x)
    nn.Module.__call__ = ours  # the other tool restores what it found
    nn.ReLU()(x)
    assert nn.Module.__call__ is original
    assert seen == ["Linear"]


def test_foreign_patch_removed_inside_is_not_brought_back(x):
    """A patch that was there before us and is taken away meanwhile stays away."""
    original = nn.Module.__call__
    nn.Module.__call__ = foreign(original)
    with ModTracker() as tracker:
        nn.Linear(4, 4)(x)
        nn.Module.__call__ = original
        nn.Linear(4, 4)(x)
    assert nn.Module.__call__ is original
    assert tracker.parents == {"Global"}


def test_foreign_patch_below_is_called(x):
    """A patch that was there before us still runs, and is there again afterwards."""
    original, calls = nn.Module.__call__, []

    def counting(self, *args, **kwargs):
        calls.append(type(self).__name__)
        return original(self, *args, **kwargs)

    nn.Module.__call__ = counting
    try:
        with ModTracker():
            nn.Linear(4, 4)(x)
        assert nn.Module.__call__ is counting
    finally:
        nn.Module.__call__ = original
    assert calls == ["Linear"]


def test_compiled_call_of_a_module_is_used(x):
    """The shortcut past torch's `__call__` still honours `module.compile()`."""
    module = nn.Linear(4, 4)
    module._compiled_call_impl = lambda value: value * 0
    with ModTracker():
        assert torch.equal(module(x), x * 0)


def test_exit_inside_a_forward_is_clean(x):
    """A tracker left while a module runs unwinds with that module."""
    tracker = ModTracker()

    class Leaves(nn.Module):
        def forward(self, value):
            tracker.__exit__(None, None, None)
            return value * 2

    tracker.__enter__()
    nn.Sequential(Leaves())(x)
    assert tracker.stack == ()


def test_one_exit_too_many_changes_nothing(x):
    """The next block works as ever."""
    tracker, names = ModTracker(), []
    tracker.subscribe(pre_forward=lambda call, *_: names.append(call.name))
    with tracker:
        pass
    tracker.__exit__(None, None, None)
    with tracker:
        nn.Linear(4, 4)(x)
    assert names == ["Linear"]


def test_tracker_may_be_entered_and_left_in_different_threads(x):
    """The patch belongs to the process, not to a thread."""
    tracker, names = ModTracker(), []
    tracker.subscribe(pre_forward=lambda call, *_: names.append(call.name))
    thread = threading.Thread(target=tracker.__enter__)
    thread.start()
    thread.join()
    nn.Linear(4, 4)(x)
    tracker.__exit__(None, None, None)
    assert names == ["Linear"]


def test_tracker_entered_inside_a_module_does_not_leave_it(x):
    """The end of a call whose beginning was not seen is nobody's, and the model's result stays."""
    tracker, seen = ModTracker(), []
    tracker.subscribe(post_forward=lambda call, *_: seen.append(call.name))

    class Enters(nn.Sequential):
        def forward(self, x):
            tracker.__enter__()
            return super().forward(x)

    model = Enters(nn.ReLU())
    try:
        assert torch.equal(model(x), x.relu())
    finally:
        tracker.__exit__(None, None, None)
    assert seen == ["ReLU"]
    assert (tracker.phase, tracker.stack) == ("outside", ())


def test_two_threads_put_their_layers_on_each_other(monkeypatch, meanwhile, x):
    """Neither takes the other's off by putting its own on what was there before."""
    first, second, calls = ModTracker(), ModTracker(), []
    first.subscribe(pre_forward=lambda *_: calls.append("first"))
    second.subscribe(pre_forward=lambda *_: calls.append("second"))
    monkeypatch.setattr(entry, "tracked", meanwhile.at(entry.tracked, second.__enter__))
    with first:
        meanwhile.ends()
        nn.Linear(4, 4)(x)
    second.__exit__()
    assert sorted(calls) == ["first", "second"]
