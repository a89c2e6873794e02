"""A call in words: its names, its place, its indexes and its module."""

from __future__ import annotations

from torch import nn

from mod_tracker import ModTracker


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
