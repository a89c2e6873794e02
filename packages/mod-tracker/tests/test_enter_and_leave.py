"""Trackers that are entered, left, copied, or asked after they were left."""

from __future__ import annotations

import copy
import pickle
from collections import Counter

from torch import nn

from mod_tracker import ModTracker

BW = "backward"


def test_trackers_may_leave_in_any_order(mlp, x):
    """Overlapping trackers each see their part, and the patch is gone at the end."""
    original = nn.Module.__call__
    first, second = ModTracker(), ModTracker()
    counts = Counter()
    first.subscribe(pre_forward=lambda *_: counts.update("1"), types=nn.Linear)
    second.subscribe(pre_forward=lambda *_: counts.update("2"), types=nn.Linear)
    first.__enter__()
    second.__enter__()
    mlp(x)
    first.__exit__(None, None, None)
    mlp(x)
    second.__exit__(None, None, None)
    mlp(x)
    assert counts == {"1": 2, "2": 4}
    assert nn.Module.__call__ is original


def test_one_tracker_entered_twice_sees_each_call_once(x):
    """Entering again counts; nothing leaks after the last exit."""
    original, module = nn.Module.__call__, nn.modules.module
    tracker, calls = ModTracker(), []
    tracker.subscribe(pre_forward=lambda call, *_: calls.append(call.name))
    with tracker:
        with tracker:
            nn.Linear(4, 4)(x)
        nn.ReLU()(x)
    nn.ReLU()(x)
    assert calls == ["Linear", "ReLU"]
    assert nn.Module.__call__ is original
    assert not module._global_forward_hooks
    assert not module._global_forward_pre_hooks


def test_backward_after_exit_is_attributed(mlp, x):
    """The graph outlives the block; so does the answer, events included."""
    tracker, events = ModTracker(), []
    tracker.register_user_hooks(pre_bw_hook=lambda m, _: events.append(tracker.get_known_fqn(m)))
    seen = []
    with tracker:
        y = mlp(x)
    y.register_hook(lambda _: seen.append((tracker.is_bw, tracker.current)))
    y.sum().backward()
    assert seen == [(True, "MLP.b")]
    assert events == ["MLP.b", "MLP", "MLP.a"]


def test_forward_before_enter_is_unknown_in_backward(mlp, x, log_ops):
    """What was not seen is not guessed."""
    loss = mlp(x).sum()
    entries = log_ops(ModTracker(), loss.backward)
    assert {(phase, stack) for phase, _, stack in entries} == {(BW, ())}


def test_tracker_can_be_pickled_and_copied(mlp, x):
    """A copy starts afresh with the same options."""
    tracker = ModTracker(history=7)
    with tracker:
        mlp(x)
    for twin in (pickle.loads(pickle.dumps(tracker)), copy.deepcopy(tracker)):
        assert twin._options == tracker._options
        assert twin.roots == {}
        with twin:
            mlp(x)
        assert twin.get_known_fqn(mlp.a) == "MLP.a"


def test_two_threads_enter_one_tracker(monkeypatch, meanwhile):
    """The second finds it entered, and puts on no layer that nobody takes off."""
    original, tracker = nn.Module.__call__, ModTracker()
    install = meanwhile.at(tracker._call_patch.install, tracker.__enter__)
    monkeypatch.setattr(tracker._call_patch, "install", install)
    with tracker:
        meanwhile.ends()
    assert nn.Module.__call__ is not original
    tracker.__exit__()
    assert nn.Module.__call__ is original
