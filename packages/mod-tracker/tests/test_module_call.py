"""`ModuleCall`: names, stack, indexes and module of a call."""

from __future__ import annotations

import gc
from functools import partial

from torch import nn

from mod_tracker import ModTracker


def step(model, x):
    """One forward and backward."""
    model(x).sum().backward()


def test_call_has_names_indexes_and_module(mlp, x):
    """Name, stack, depth, indexes and the module itself."""
    tracker, calls = ModTracker(), []
    tracker.register_user_hooks(lambda *_: calls.append(tracker.call))
    with tracker:
        for _ in range(3):
            step(mlp, x)
    last = calls[-1]
    assert (last.name, last.stack, last.depth) == ("MLP.b", ("MLP", "MLP.b"), 2)
    assert (last.iteration, last.call_index, last.module) == (2, 2, mlp.b)
    assert tracker.call is None
    assert (tracker.iteration, tracker.call_index, tracker.called_as) == (None, None, None)


def test_recompute_has_the_indexes_of_its_forward(checkpointed, x):
    """A recompute is not counted as a new call."""
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
    tracker, calls = ModTracker(), []
    tracker.register_user_hooks(lambda *_: calls.append((tracker.current, tracker.called_as)))
    with tracker:
        Shared()(x)
    assert calls[1] == ("Shared.a", "Shared.a")
    assert calls[3] == ("Shared.a", "Shared.seq.0")


def calls_of(tracker, run):
    """Return the calls that a hook sees during `run`."""
    calls = []
    tracker.register_user_hooks(lambda *_: calls.append(tracker.call))
    with tracker:
        run()
    return calls


def test_call_keeps_no_module_alive(x):
    model = nn.Sequential(nn.ReLU())
    calls = calls_of(ModTracker(), partial(model, x))
    assert [call.module for call in calls] == [model, model[0]]
    del model
    gc.collect()
    assert [call.module for call in calls] == [None, None]
    assert [call.name for call in calls] == ["Sequential", "Sequential.0"]


def test_index_is_of_the_path_and_iteration_of_the_root(x):
    """A module called three times in a forward has three indexes in one iteration."""

    class Thrice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.ReLU()

        def forward(self, x):
            return self.a(self.a(self.a(x)))

    model = Thrice()
    calls = calls_of(ModTracker(), lambda: (model(x), model(x)))
    assert [(call.iteration, call.call_index) for call in calls if call.depth == 2] == [
        *((0, 0), (0, 1), (0, 2)),
        *((1, 3), (1, 4), (1, 5)),
    ]
