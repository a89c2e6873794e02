"""The long way around a call: every switch is told, and other threads can find its graph."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mod_tracker import ModTracker
from mod_tracker._attribution import Attribution
from mod_tracker._backward import Backward
from mod_tracker._call_events import call_slow_path, mark_origin
from mod_tracker._listeners import INTERNAL, NOTHING
from mod_tracker._record import Path
from mod_tracker._torch_compat import NO_TASK


@pytest.fixture
def scene():
    """A backward, the state of this thread, and a path below its outside that nobody listens to."""
    backward = Backward(Attribution(limit=99))
    state = backward.attribution.open_state()
    module = nn.ReLU()
    return backward, state, Path(lambda: module, parent=state.base[0], name="ReLU")


def called(scene, run, listeners):
    """What a call of the long way gives."""
    backward, state, path = scene
    path.listeners = listeners
    return call_slow_path(backward, state, path, state.base, run, (), {})


def test_graph_of_the_compiler_is_run_and_is_no_call(scene):
    """It is not entered: what runs in it runs in the call around it."""
    _, state, path = scene
    seen = []
    called(scene, lambda: seen.append((state.call, path.last[1])), INTERNAL)
    called(scene, lambda: seen.append((state.call[0], path.last[1])), NOTHING)
    assert seen == [(state.base, -1), (path, 0)]


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
def test_call_that_raises_leaves_the_state_as_it_was(error, scene):
    """Call, task and what is shown; the interval that it ran in is its own."""
    _, state, path = scene
    before, made = (state.call, state.task, state.shown), []

    def run():
        made.append(torch.ones(1, requires_grad=True).exp().grad_fn._sequence_nr())
        raise error

    with pytest.raises(type(error)):
        called(scene, run, None)
    torch.ones(1, requires_grad=True).exp()
    assert (state.call, state.task, state.shown) == before
    assert state.find(made[0])[0] is path
    assert state.find(made[0] + 1) is state.base


def test_state_that_cannot_be_entered_is_left_as_it_was(scene, monkeypatch):
    """An interrupt at the entry: no call began, and none is taken for it."""
    state = scene[1]

    def refuse(*_):
        state.call = ("half", 0, None)
        raise KeyboardInterrupt

    monkeypatch.setattr(type(state), "push", refuse)
    with pytest.raises(KeyboardInterrupt):
        called(scene, lambda: None, None)
    assert (state.call, state.task) == (state.base, NO_TASK)


class Around(nn.Module):
    """Computes before and after a module inside it."""

    def __init__(self, made):
        super().__init__()
        self.inner, self.made = nn.Tanh(), made

    def forward(self, x):
        for step in (torch.exp, self.inner, torch.sin):
            x = step(x)
            self.made.append(x)
        return x


def test_nodes_are_the_calls_that_made_them(x):
    """Before, inside and after an inner call, also where every switch is told."""
    made, found = [], []
    model = Around(made)
    with ModTracker() as tracker, tracker.on_switch(lambda *_: None):
        model(x)
        for tensor in made:
            tensor.register_hook(lambda _: found.append(tracker.current))
        made[-1].sum().backward()
    assert found == ["Around", "Around.inner", "Around"]


def test_switches_of_a_recompute_are_told_as_such(checkpointed, x):
    """Its entries are, and its exits, which lead to the code around them that runs again."""
    model, seen = checkpointed(use_reentrant=True), []
    with ModTracker() as tracker:
        y = model(x).sum()
        with tracker.on_switch(lambda call, phase: seen.append((call and call.name, phase))):
            y.backward()
    names = [name for name, phase in seen if phase == "recompute"]
    inner = ["Checkpointed.m.a", "Checkpointed.m", "Checkpointed.m.b", "Checkpointed.m"]
    assert names[:5] == ["Checkpointed.m", *inner]
    assert seen[5] == ("Checkpointed", "recompute")
    assert seen[-1] == (None, "outside")


def test_module_that_a_hook_of_a_backward_calls_is_the_hooks_modules(x):
    """Entry and exit tell the module whose event is told, and not the one that is called."""
    seen, other = [], nn.Sigmoid()
    tracker = ModTracker()
    tracker.register_user_hooks(pre_bw_hook=lambda *_: other(torch.ones(1)))
    model = nn.Tanh()
    with tracker:
        y = model(x)
        with tracker.on_switch(lambda call, phase: seen.append((call and call.name, phase))):
            y.sum().backward()
    assert seen[:2] == [("Tanh", "backward")] * 2
    assert not any(name == "Sigmoid" for name, _ in seen)


def test_listeners_are_given_the_module_and_its_call_runs_inside_it(x):
    """The user's module, and not a stand-in; the call that runs is its own."""
    tracker, given, model = ModTracker(), [], nn.ReLU()
    tracker.register_user_hooks(
        pre_fw_hook=lambda module, _: given.append((module, tracker.current))
    )
    with tracker, tracker.on_switch(lambda *_: None):
        model(x)
    assert given == [(model, "ReLU")]


@pytest.mark.parametrize(
    ("threaded", "outermost", "task", "marked"),
    [
        (True, True, NO_TASK, True),
        (True, False, NO_TASK, False),
        (True, False, 7, True),
        (False, True, NO_TASK, False),
        (False, False, 7, False),
    ],
)
def test_origin_is_marked_where_a_backward_may_begin(threaded, outermost, task, marked):
    """At outputs of outermost calls, in forward or in a recompute, if there are more threads."""
    marks, base = [], object()
    backward = SimpleNamespace(
        attribution=SimpleNamespace(threaded=threaded),
        mark_origin=lambda state, output: marks.append(output),
    )
    state = SimpleNamespace(call=base if outermost else object(), base=base, task=task)
    mark_origin(backward, state, "output")
    assert marks == ["output"] * marked
