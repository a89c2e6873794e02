"""A call in words: its names, its place, its indexes and its module."""

from __future__ import annotations

import dataclasses
import gc
import threading
from dataclasses import FrozenInstanceError
from functools import partial

import pytest
from torch import nn

from mod_tracker import ModTracker
from mod_tracker._module_call import describe
from mod_tracker._record import outside


def step(model, x):
    """One forward and backward."""
    model(x).sum().backward()


def test_call_tells_all_of_a_running_call(mlp, x):
    """Name, stack, depth, indexes and the module itself."""
    tracker, calls = ModTracker(), []
    tracker.subscribe(pre_forward=lambda call, *_: calls.append(call), include="b")
    with tracker:
        for _ in range(3):
            step(mlp, x)
    last = calls[-1]
    assert (last.name, last.stack, last.depth) == ("MLP.b", ("MLP", "MLP.b"), 2)
    assert (last.iteration, last.call_index, last.module) == (2, 2, mlp.b)
    assert tracker.call is None
    assert (tracker.iteration, tracker.call_index, tracker.called_as) == (None, None, None)


def test_recompute_has_the_indexes_of_its_forward(checkpointed, x):
    """A recompute counts no new call."""
    model, seen = checkpointed(use_reentrant=True), []
    tracker = ModTracker()
    model.m.a.register_forward_pre_hook(
        lambda *_: seen.append((tracker.phase, tracker.iteration, tracker.call_index))
    )
    with tracker:
        for _ in range(2):
            step(model, x)
    assert seen == [("forward", 0, 0), ("recompute", 0, 0), ("forward", 1, 1), ("recompute", 1, 1)]


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4, bias=False)
        self.seq = nn.Sequential(self.a, nn.ReLU())

    def forward(self, x):
        return self.seq(self.a(x))


def test_shared_module_has_one_name_and_two_called_paths(x):
    """The canonical name is the first registered; the path of the call is kept beside it."""
    tracker, calls = ModTracker(), []
    tracker.subscribe(
        pre_forward=lambda call, *_: calls.append((call.name, call.called_as)), types=nn.Linear
    )
    with tracker:
        Shared()(x)
    assert calls == [("Shared.a", "Shared.a"), ("Shared.a", "Shared.seq.0")]


def calls_of(tracker, run, **filters):
    """The calls that are told while something runs."""
    calls = []
    with tracker, tracker.subscribe(pre_forward=lambda call, *_: calls.append(call), **filters):
        run()
    return calls


def test_outside_is_no_call():
    """Nor is it where no module has run yet."""
    assert describe(outside()) is None
    with ModTracker() as tracker:
        assert tracker.call is None


def test_call_cannot_be_changed(x):
    """It may be kept, and says what was."""
    (call,) = calls_of(ModTracker(), lambda: nn.ReLU()(x))
    for name in ("name", "stack", "call_index", "iteration", "_module"):
        with pytest.raises(FrozenInstanceError):
            setattr(call, name, None)
    assert (call.name, call.stack, call.call_index, call.iteration) == ("ReLU", ("ReLU",), 0, 0)


def test_call_keeps_no_module_alive(x):
    """What is left of one that is gone is its name."""
    model = nn.Sequential(nn.ReLU())
    calls = calls_of(ModTracker(), partial(model, x))
    assert [call.module for call in calls] == [model, model[0]]
    del model
    gc.collect()
    assert [call.module for call in calls] == [None, None]
    assert [call.name for call in calls] == ["Sequential", "Sequential.0"]


def test_calls_are_equal_by_what_they_say(x):
    """Of two looks at one call, whatever the module; another index is another call."""
    tracker, model, looks = ModTracker(), nn.ReLU(), []
    model.register_forward_hook(lambda *_: looks.extend((tracker.call, tracker.call)))
    with tracker:
        model(x)
        model(x)
    assert looks[0] == looks[1] != looks[2]
    assert looks[0] is not looks[1]
    assert len(set(looks)) == 2
    assert dataclasses.replace(looks[0], _module=lambda: None) == looks[0]


def test_call_in_words_shows_what_it_says_and_no_module(x):
    """It is short enough for a log."""
    (call,) = calls_of(ModTracker(), lambda: nn.ReLU()(x))
    assert repr(call) == (
        "ModuleCall(name='ReLU', called_as='ReLU', stack=('ReLU',), call_index=0, iteration=0)"
    )


def test_index_is_of_the_path_and_iteration_of_the_root(x):
    """A module called three times in a forward has three indexes in one iteration."""

    class Thrice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.ReLU()

        def forward(self, x):
            return self.a(self.a(self.a(x)))

    model = Thrice()
    calls = calls_of(ModTracker(), lambda: (model(x), model(x)), include="a")
    assert [(call.iteration, call.call_index) for call in calls] == [
        *((0, 0), (0, 1), (0, 2)),
        *((1, 3), (1, 4), (1, 5)),
    ]


def test_module_on_two_paths_has_an_index_on_each(x):
    """Called alone it is a root, with iterations of its own."""
    part = nn.ReLU()
    model, tracker = nn.Sequential(part), ModTracker()
    calls = calls_of(tracker, lambda: (model(x), part(x), model(x), part(x), part(x)))
    own = [call for call in calls if call.module is part]
    assert [(call.depth, call.call_index, call.iteration) for call in own] == [
        *((2, 0, 0), (1, 0, 0), (2, 1, 1), (1, 1, 1), (1, 2, 2))
    ]
    assert {call.name for call in own} == {"Sequential.0"}


def test_call_that_fails_is_counted(x):
    """The next one is the second."""

    class Fails(nn.Module):
        def forward(self, x):
            raise ValueError("no")

    def twice():
        for _ in range(2):
            with pytest.raises(ValueError, match="no"):
                model(x)

    model = Fails()
    assert [call.call_index for call in calls_of(ModTracker(), twice)] == [0, 1]


def test_each_thread_counts_its_own_calls(x):
    """Of one model: a second thread begins with its first."""
    model = nn.Sequential(nn.ReLU())

    def run():
        for _ in range(2):
            model(x)
        thread = threading.Thread(target=model, args=(x,))
        thread.start()
        thread.join()

    calls = calls_of(ModTracker(), run, include="0")
    assert [(call.call_index, call.iteration) for call in calls] == [(0, 0), (1, 1), (0, 0)]


def test_backward_has_the_call_of_its_forward(x):
    """Its index and iteration, also after later forwards."""
    tracker, seen, model = ModTracker(), [], nn.Sequential(nn.Tanh())
    tracker.subscribe(pre_backward=lambda call, _: seen.append(call), include="0")
    with tracker:
        losses = [model(x).sum() for _ in range(3)]
        for loss in reversed(losses):
            loss.backward()
    assert [(call.call_index, call.iteration) for call in seen] == [(2, 2), (1, 1), (0, 0)]
    assert all(call.module is model[0] for call in seen)


def test_module_that_calls_itself_is_in_its_stack_as_often(x):
    """One name, three places; every depth has an index of its own."""

    class Again(nn.Module):
        def forward(self, x, times=2):
            return self(x, times - 1) if times else x

    model = Again()
    calls = calls_of(ModTracker(), lambda: (model(x), model(x)))
    assert [call.stack for call in calls[:3]] == [("Again",) * depth for depth in (1, 2, 3)]
    assert [call.depth for call in calls] == [1, 2, 3] * 2
    assert [(call.call_index, call.iteration) for call in calls[3:]] == [(1, 1)] * 3
