"""What a thread does: a stack of its own, and a graph that knows the thread that made it."""

from __future__ import annotations

import random
import threading

import pytest
import torch
from torch import nn

from mod_tracker import ModTracker, _thread_state
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


class Counter:
    """Stands for autograd's counter, and knows who made which number."""

    def __init__(self, monkeypatch):
        self.now, self.made = 5, {}
        monkeypatch.setattr(_thread_state, "next_number", lambda: self.now)

    def make(self, call, count=1):
        """Nodes that a call makes."""
        for _ in range(count):
            self.made[self.now] = call
            self.now += 1


@pytest.fixture
def counter(monkeypatch):
    """A counter that only the test moves."""
    return Counter(monkeypatch)


@pytest.fixture
def state(counter):
    """A state that has seen nothing."""
    return ThreadState(limit=10_000)


def path_in(call, name="inner"):
    """A path below a call."""
    return Path(lambda: None, parent=call[0], name=name)


def test_new_state_is_outside_and_knows_no_node(state):
    """Of the thread that made it, with no backward, nothing shown, and one outside for all."""
    assert (state.call, state.task, state.shown) == (state.base, NO_TASK, None)
    assert (state.thread, state.inner, state.owner) == (threading.get_ident(), False, None)
    assert [path.parent for path in state.walk()] == [None]
    assert state.find(4)[2] is state.find(5)[2] is None
    assert (len(state.record), state.leaves, state.paths) == (0, {}, {})


def test_states_share_nothing(counter):
    """Paths, leaves, records and what carries hooks are each thread's own."""
    first, second = ThreadState(limit=9), ThreadState(limit=9, inner=True)
    assert (first.inner, second.inner) == (False, True)
    for name in ("base", "record", "leaves", "paths", "carrier"):
        assert getattr(first, name) is not getattr(second, name)


def test_index_counts_the_calls_of_a_path(state):
    """Failed or not; a recompute, and one inside it, repeat the number of the last."""
    path, indexes = path_in(state.base), []
    for task in (NO_TASK, NO_TASK, 7, 7, NO_TASK, 0):
        call = state.push(path, state.base, task)
        indexes.append(call[1])
        assert (state.call, state.task, path.last) == (call, task, call)
        state.pop(call, state.base, NO_TASK, state.base)
    assert indexes == [0, 1, 1, 1, 2, 2]
    assert (state.call, state.task) == (state.base, NO_TASK)


def test_calls_without_nodes_leave_no_interval(state):
    """Inference: the counter stands still, whatever is called and looked at."""
    path = path_in(state.base)
    for _ in range(100):
        call = state.push(path, state.base, NO_TASK)
        state.explain(call)
        state.pop(call, state.base, NO_TASK, state.base)
    state.resume()
    assert len(state.record) == 0


def test_nodes_after_a_recompute_are_borrowed_by_the_call_around_it(state, counter):
    """The backward goes on there; the call that was interrupted has those after `resume`."""
    around = (path_in(state.base, "around"), 3, state.base)
    inner = state.push(path_in(around), around, 7)
    counter.make(inner, 2)
    state.pop(inner, state.base, NO_TASK, around)
    assert state.owner is not None
    counter.make(around, 3)
    assert state.find(counter.now) is around
    state.resume()
    assert state.owner is None
    counter.make(state.base, 2)
    assert {number: state.find(number) for number in counter.made} == counter.made


def test_borrowed_interval_ends_where_the_next_call_begins(state, counter):
    """Without `resume`, as of a backward that has failed."""
    around = (path_in(state.base, "around"), 0, state.base)
    inner = state.push(path_in(around), around, 7)
    state.pop(inner, state.base, NO_TASK, around)
    counter.make(around)
    other = state.push(path_in(state.base, "other"), state.base, NO_TASK)
    assert state.owner is None
    counter.make(other)
    state.pop(other, state.base, NO_TASK, state.base)
    assert {number: state.find(number) for number in counter.made} == counter.made


def test_what_is_explained_is_of_the_last_look(state, counter):
    """Nodes before it stay whose they were; those of the running call need no explanation."""
    maker, other = (path_in(state.base), 0, state.base), (path_in(state.base), 1, state.base)
    counter.make(state.base, 2)
    state.explain(state.base)
    for call, count in ((maker, 2), (maker, 1), (other, 1), (state.base, 2), (maker, 1)):
        counter.make(call, count)
        state.explain(call)
    assert {number: state.find(number) for number in counter.made} == counter.made
    assert state.owner is not None


def test_looking_twice_changes_nothing(state, counter):
    """Another's interval of no nodes is none."""
    maker = (path_in(state.base), 0, state.base)
    counter.make(state.base)
    state.explain(state.base)
    state.explain(maker)
    state.explain(state.base)
    counter.make(state.base)
    assert state.find(5) is state.find(6) is state.base
    assert [call[0] for call in state.record.calls if call[0] is maker[0]] == []


def test_walk_gives_every_path_the_outside_first(state):
    """Depth first, as they were called; of those that are gone, none."""
    outer, keep = path_in(state.base, "a"), []
    for at, name in enumerate("bc"):
        keep.append(path_in((outer, 0, state.base), name))
        outer.children[at] = keep[-1]
    state.base[0].children[0] = outer
    assert [path.name for path in state.walk()] == ["", "a", "b", "c"]
    del outer.children[0]
    assert [path.name for path in state.walk()] == ["", "a", "c"]


@pytest.mark.parametrize("seed", range(40))
def test_every_node_is_found_with_the_call_that_made_it(state, counter, seed):
    """Calls, recomputes, looks and backwards that go on, in any order: none is told wrongly."""
    choose = random.Random(seed)
    around = [(path_in(state.base, f"around {n}"), n, state.base) for n in range(3)]
    open_calls, owner = [], state.base
    for _ in range(200):
        action = choose.choice(("make", "make", "push", "recompute", "pop", "resume", "explain"))
        if action == "make":
            counter.make(owner, choose.randrange(4))
        elif action in ("push", "recompute"):
            outer = state.call if action == "push" else choose.choice(around)
            before = (state.call, state.task)
            task = state.task if action == "push" else 7
            owner = state.push(path_in(outer), outer, task)
            open_calls.append((owner, *before, outer))
        elif action == "pop" and open_calls:
            inner, before, before_task, outer = open_calls.pop()
            state.pop(inner, before, before_task, outer)
            owner = outer
        elif action == "resume":
            state.resume()
            owner = state.call
        elif action == "explain":
            state.explain(owner)
            owner = choose.choice([*around, state.call])
            counter.make(owner, choose.randrange(3))
            state.explain(owner)
    assert {number: state.find(number) for number in counter.made} == counter.made


def test_full_record_of_a_thread_keeps_the_newest(counter):
    """As many intervals as the limit, and the open one."""
    state = ThreadState(limit=4)
    path = path_in(state.base)
    for _ in range(50):
        call = state.push(path, state.base, NO_TASK)
        counter.make(call)
        state.pop(call, state.base, NO_TASK, state.base)
    assert len(state.record) <= 4
    assert state.find(counter.now - 1) is call
    assert state.find(5)[2] is None
