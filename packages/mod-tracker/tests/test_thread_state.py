"""What a thread does: a stack of its own, and a graph that knows the thread that made it."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from mod_tracker import ModTracker
from mod_tracker._record import Path
from mod_tracker._thread_state import ThreadState
from mod_tracker._torch_compat import NO_TASK, next_number


def test_threads_have_stacks_of_their_own():
    """Two models in two threads at the same time do not see each other."""
    meet, seen = threading.Barrier(2, timeout=20), {}

    class Waits(nn.Module):
        def forward(self, x):
            meet.wait()
            seen[threading.get_ident()] = tracker.stack
            meet.wait()
            return x

    class A(nn.Sequential):
        pass

    class B(nn.Sequential):
        pass

    with ModTracker() as tracker:
        threads = [
            threading.Thread(target=m, args=(torch.ones(1),)) for m in (A(Waits()), B(Waits()))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(seen.values()) == [("A", "A.0"), ("B", "B.0")]


def test_one_model_in_four_threads_is_exact():
    """4 x 100 steps of one model: no error, and every operation in its own module."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    wrong, errors = [], []

    def expect(module, name):
        def check(grad):
            if tracker.stack != ("Sequential", name):
                wrong.append(tracker.stack)

        return lambda _, args, output: output.register_hook(check) and None

    for name in "012":
        getattr(model, name).register_forward_hook(expect(model, f"Sequential.{name}"))

    def work():
        try:
            for _ in range(100):
                model(torch.randn(2, 4)).sum().backward()
        except Exception as error:
            errors.append(error)

    with ModTracker() as tracker:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert (wrong, errors) == ([], [])


@pytest.mark.parametrize("listens", [False, True])
def test_backward_in_another_thread_is_looked_up_where_the_graph_was_made(x, log_ops, listens):
    """A graph built in one thread and run in another, whose numbers collide, is attributed."""
    built, model = [], nn.Sequential(nn.Linear(4, 4, bias=False))
    other = nn.Sequential(nn.Identity(), nn.Linear(4, 4, bias=False))
    tracker, heard = ModTracker(), []
    if listens:
        tracker.subscribe(pre_forward=lambda call, *_: heard.append(call.name))
    with tracker:
        other(x)  # gives this thread a record of its own
        thread = threading.Thread(target=lambda: built.append(model(x.detach())))
        thread.start()
        thread.join()
    entries = log_ops(tracker, built[0].sum().backward)
    assert {stack for _, _, stack in entries} == {("Sequential#2", "Sequential#2.0")}
    assert len(heard) == 5 * listens


def test_what_is_explained_begins_no_earlier_than_the_open_interval():
    """Nodes that a call made before it ended stay its own."""
    state = ThreadState(limit=9)
    path = Path(lambda: None, parent=state.base[0])
    inner = state.push(path, state.base, NO_TASK)
    number = next_number()
    torch.ones(1, requires_grad=True).exp()
    state.pop(inner, state.base, NO_TASK, (path, 7, state.base))
    state.explain((path, 8, state.base))
    assert state.find(number) is inner
