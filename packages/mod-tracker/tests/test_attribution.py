"""Thread states, and attribution of a backward that runs in another thread than its forward."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mod_tracker import ModTracker
from mod_tracker._attribution import KEPT_STATES, KEPT_TASKS

FW, RE, BW, OUT = "forward", "recompute", "backward", "outside"


class Net(nn.Sequential):
    """One layer with a unique name."""

    def __init__(self):
        super().__init__(nn.Linear(4, 4, bias=False))


class Other(nn.Sequential):
    """Creates nodes in a thread, with numbers that collide with those of other threads."""

    def __init__(self):
        super().__init__(nn.Identity(), nn.Linear(4, 4, bias=False))


class Doubles(nn.Module):
    """Two layers in a checkpointed region, with an action to run during recompute."""

    def __init__(self, *, use_reentrant):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.use_reentrant, self.passes, self.meanwhile = use_reentrant, 0, lambda: None

    def region(self, x):
        y = self.a(x)
        self.passes += 1
        if self.passes == 2:
            self.meanwhile()
        return self.b(y)

    def forward(self, x):
        return checkpoint(self.region, x, use_reentrant=self.use_reentrant)


def in_thread(function):
    """Call `function` in a new thread; return its result, or raise its exception."""
    notified = []

    def work():
        try:
            notified.append((function(), None))
        except BaseException as error:
            notified.append((None, error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(timeout=60)
    assert notified, "the thread did not end"
    result, error = notified[0]
    if error is not None:
        raise error
    return result


def stacks_of(entries, phase, op):
    """Stacks of the operations with this name and phase."""
    return [stack for at, name, stack in entries if (at, name) == (phase, op)]


def test_thread_that_ran_no_module_is_outside():
    tracker, seen = ModTracker(), []

    class Asks(nn.Module):
        def forward(self, x):
            seen.append(in_thread(lambda: (tracker.stack, tracker.phase)))
            return x

    with tracker:
        Asks()(torch.ones(1))
    assert seen == [((), OUT)]


def test_backward_in_a_thread_that_ran_no_module_is_attributed(x, log_ops):
    """The thread has no state; the only state that exists created the graph."""
    tracker, model = ModTracker(), Net()
    with tracker:
        loss = model(x).sum()
    entries = in_thread(lambda: log_ops(tracker, loss.backward))
    assert entries == [(BW, "mm", ("Net", "Net.0"))] * 2


def test_backward_in_a_thread_that_made_no_nodes_is_attributed(x, log_ops):
    tracker, model = ModTracker(), Net()

    def work():
        with torch.no_grad():
            Other()(torch.randn(2, 4))
        return log_ops(tracker, loss.backward)

    with tracker:
        loss = model(x).sum()
        entries = in_thread(work)
    assert stacks_of(entries, BW, "mm") == [("Net", "Net.0")] * 2


@pytest.mark.parametrize("known", [False, True])
def test_reentrant_recompute_in_another_thread_is_attributed(x, log_ops, known):
    """Another thread recomputes, inside a backward of this thread's graph, and makes nodes."""
    tracker, model, other = ModTracker(), Doubles(use_reentrant=True), Other()

    def work():
        if known:
            other(torch.randn(2, 4))
        return log_ops(tracker, loss.backward)

    with tracker:
        other(x)
        in_thread(lambda: other(torch.randn(2, 4)))
        loss = model(x).sum()
        entries = in_thread(work)
    assert stacks_of(entries, RE, "mm") == [("Doubles", "Doubles.a"), ("Doubles", "Doubles.b")]
    assert (
        sorted(stacks_of(entries, BW, "mm"))
        == [("Doubles", "Doubles.a")] * 2 + [("Doubles", "Doubles.b")] * 2
    )


def test_model_from_before_the_second_thread_runs_in_a_third(x, log_ops):
    """When a second thread runs modules, outputs of earlier calls are marked as well."""
    tracker, model, other = ModTracker(), Net(), Other()

    def work():
        other(torch.randn(2, 4))
        return log_ops(tracker, loss.backward)

    with tracker:
        model(x)
        in_thread(lambda: other(torch.randn(2, 4)))
        loss = model(x).sum()
        entries = in_thread(work)
    assert stacks_of(entries, BW, "mm") == [("Net", "Net.0")] * 2


def test_graph_from_before_the_second_thread_is_the_threads_own(x, log_ops):
    tracker, model = ModTracker(), Net()
    with tracker:
        loss = model(x).sum()
        in_thread(lambda: Other()(torch.randn(2, 4)))
        entries = log_ops(tracker, loss.backward)
    assert stacks_of(entries, BW, "mm") == [("Net", "Net.0")] * 2


def test_thread_states_are_bounded(x):
    """The newest states are kept, and a running thread keeps its own."""
    tracker, model = ModTracker(), Net()
    with tracker:
        for _ in range(KEPT_STATES + 5):
            in_thread(lambda: model(torch.ones(1, 4)))
    assert len(tracker._attribution.states) == KEPT_STATES


def test_claims_of_backwards_are_bounded(x):
    tracker, model = ModTracker(), Net()
    with tracker:
        in_thread(lambda: model(torch.ones(1, 4)))
        for _ in range(KEPT_TASKS + 5):
            model(x).sum().backward()
    tasks = list(tracker._attribution._task_states)
    assert len(tasks) == KEPT_TASKS
    assert tasks == sorted(tasks)


def test_forward_after_a_recompute_that_failed_is_attributed(mlp, x, log_ops):
    """A recompute that fails leaves no attribution of later nodes to the recomputed module."""

    def fail(grad):
        raise ZeroDivisionError

    def fails():
        y = x * 1
        y.register_hook(fail)
        with pytest.raises(ZeroDivisionError):
            net(y).sum().backward()
        mlp(x).sum().backward()

    net = Doubles(use_reentrant=False)
    expected = log_ops(ModTracker(), lambda: mlp(x).sum().backward())
    entries = log_ops(ModTracker(), fails)
    assert entries[-len(expected) :] == expected
    assert (RE, "mm", ("Doubles", "Doubles.a")) in entries


def test_graph_module_of_the_users_is_a_module(x):
    tracker, seen = ModTracker(), []

    def traced():
        module = nn.Sequential(nn.Tanh())
        module[0].register_forward_hook(lambda *_: seen.append(tracker.stack))
        return torch.fx.GraphModule(module, torch.fx.Tracer().trace(module))

    around = nn.Sequential(nn.ReLU())
    with tracker:
        traced()(x)
        around(x)
        around.append(traced())
        around(x)
    assert seen == [
        ("GraphModule", "GraphModule.0"),
        ("Sequential", "Sequential.1", "Sequential.1.0"),
    ]


def test_module_that_a_hook_calls_is_each_trackers_own(x):
    first, second, heard = ModTracker(), ModTracker(), []
    module = nn.Tanh()
    x.register_hook(lambda grad: module(grad) * 0 + grad)
    for name, tracker in (("first", first), ("second", second)):
        tracker.register_user_hooks(
            lambda *_, t=tracker, name=name: heard.append((name, t.current))
        )
        with tracker:
            (x * 2).sum().backward()
    assert heard == [("first", "Tanh"), ("second", "Tanh")]


def test_gradients_of_a_module_at_a_reused_address():
    """The path of the dead module must not hide that of the living one."""
    seen, tracker = [], ModTracker()
    with tracker:
        for _ in range(10):
            model = nn.Sequential(nn.Linear(4, 4))
            name = lambda p, m=model: seen.append(  # noqa: E731
                tracker.get_known_fqn(m[0]) == tracker.current
            )
            model[0].weight.register_post_accumulate_grad_hook(name)
            model(torch.ones(1, 4)).sum().backward()
            model[0].weight._post_accumulate_grad_hooks.clear()
            del model, name
    assert seen == [True] * 10
