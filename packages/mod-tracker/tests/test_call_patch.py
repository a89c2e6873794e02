"""The patch of nn.Module.__call__: trackers and foreign patches come and go in any order."""

from __future__ import annotations

import functools
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import mod_tracker._call_patch as entry
from mod_tracker import ModTracker
from mod_tracker._call_patch import layer_of


def foreign(below):
    """A patch of another library."""

    def call(self, *args, **kwargs):
        return below(self, *args, **kwargs)

    return call


def test_foreign_patch_removed_inside_stays_removed(x):
    """A foreign patch that is removed inside the block is not restored."""
    original = nn.Module.__call__
    nn.Module.__call__ = foreign(original)
    with ModTracker() as tracker:
        nn.Linear(4, 4)(x)
        nn.Module.__call__ = original
        nn.Linear(4, 4)(x)
    assert nn.Module.__call__ is original
    assert tracker.parents == {"Global"}


def test_compiled_call_of_a_module_is_used(x):
    """The fast path past torch's `__call__` respects `module.compile()`."""
    module = nn.Linear(4, 4)
    module._compiled_call_impl = lambda value: value * 0
    with ModTracker():
        assert torch.equal(module(x), x * 0)


def test_exit_inside_a_forward_is_clean(x):
    """A tracker that is left while a module runs is removed when that module returns."""
    tracker = ModTracker()

    class Leaves(nn.Module):
        def forward(self, value):
            tracker.__exit__(None, None, None)
            return value * 2

    tracker.__enter__()
    nn.Sequential(Leaves())(x)
    assert tracker.stack == ()


def test_one_exit_too_many_changes_nothing(x):
    tracker, names = ModTracker(), []
    tracker.register_user_hooks(lambda *_: names.append(tracker.current))
    with tracker:
        pass
    tracker.__exit__(None, None, None)
    with tracker:
        nn.Linear(4, 4)(x)
    assert names == ["Linear"]


def test_tracker_entered_inside_a_module_does_not_leave_it(x):
    tracker, seen = ModTracker(), []
    tracker.register_user_hooks(post_fw_hook=lambda *_: seen.append(tracker.current))

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


def test_two_threads_install_layers_at_the_same_time(monkeypatch, meanwhile, x):
    first, second, calls = ModTracker(), ModTracker(), []
    first.register_user_hooks(lambda *_: calls.append("first"))
    second.register_user_hooks(lambda *_: calls.append("second"))
    monkeypatch.setattr(entry, "tracked", meanwhile.at(entry.tracked, second.__enter__))
    with first:
        meanwhile.ends()
        nn.Linear(4, 4)(x)
    second.__exit__()
    assert sorted(calls) == ["first", "second"]


law = settings(max_examples=150, deadline=None, derandomize=True, database=None)


TRACKERS = 4


moves = st.lists(
    st.tuples(
        st.sampled_from(["enter", "leave", "patch", "unpatch", "call"]),
        st.integers(0, TRACKERS - 1),
        st.booleans(),
    ),
    max_size=25,
)


@pytest.fixture(autouse=True)
def _nothing_is_left():
    """The original `__call__` is back after each test."""
    original = nn.Module.__call__
    yield
    found, nn.Module.__call__ = nn.Module.__call__, original
    assert found is original


class Worker:
    """A thread that runs given functions in order."""

    def __init__(self):
        self.jobs = []
        self.wake, self.done = threading.Semaphore(0), threading.Semaphore(0)
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self):
        while True:
            self.wake.acquire()
            job = self.jobs.pop()
            if job is None:
                return
            job()
            self.done.release()

    def __call__(self, job):
        self.jobs.append(job)
        self.wake.release()
        assert self.done.acquire(timeout=20)

    def end(self):
        self.jobs.append(None)
        self.wake.release()
        self.thread.join(20)


class Scene:
    """Trackers and a stack of foreign patches, with the modules that each saw in the last call."""

    def __init__(self):
        self.module, self.x = nn.ReLU(), torch.ones(1)
        self.original = nn.Module.__call__
        self.seen = []
        self.trackers = [ModTracker() for _ in range(TRACKERS)]
        self.entered = [0] * TRACKERS
        self.patches = []  # (patch, recorded calls)
        for number, tracker in enumerate(self.trackers):
            tracker.register_user_hooks(lambda *_, number=number: self.seen.append(number))

    def enter(self, number, polite):
        self.trackers[number].__enter__()
        self.entered[number] += 1

    def leave(self, number, polite):
        self.trackers[number].__exit__(None, None, None)
        self.entered[number] = max(0, self.entered[number] - 1)

    def patch(self, number, polite):
        below = nn.Module.__call__

        def call(module, *args, **kwargs):
            self.seen.append(id(call))
            return below(module, *args, **kwargs)

        # Copies the attributes of the wrapped function, as functools.wraps does.
        call = functools.wraps(below)(call) if polite else call
        nn.Module.__call__ = call
        self.patches.append((call, below))

    def unpatch(self, number, polite):
        if self.patches and nn.Module.__call__ is self.patches[-1][0]:
            nn.Module.__call__ = self.patches.pop()[1]

    def call(self, number, polite):
        self.seen.clear()
        assert torch.equal(self.module(self.x), self.x)
        active = [number for number, times in enumerate(self.entered) if times]
        assert sorted(self.seen) == sorted(active + [id(patch) for patch, _ in self.patches])

    def end(self):
        while any(self.entered):
            self.leave(next(n for n, times in enumerate(self.entered) if times), False)
        while self.patches:
            assert nn.Module.__call__ is self.patches[-1][0]
            self.unpatch(0, False)
            self.call(0, False)
        assert nn.Module.__call__ is self.original


@law
@given(moves)
def test_every_active_tracker_sees_a_call_once(script):
    scene, worker = Scene(), Worker()
    try:
        for move, number, flag in script:
            act = functools.partial(getattr(scene, move), number, flag)
            # A failure in the other thread is raised here.
            failures = []

            def guarded(act=act, failures=failures):
                try:
                    act()
                except BaseException as error:
                    failures.append(error)

            (worker if number % 2 else (lambda job: job()))(guarded)
            if failures:
                raise failures[0]
            scene.call(0, False)
        scene.end()
    finally:
        worker.end()
        nn.Module.__call__ = scene.original


def test_overlapping_trackers_keep_the_chain_short():
    first, second = ModTracker(), ModTracker()
    first.__enter__()
    for _ in range(50):
        second.__enter__()
        first.__exit__(None, None, None)
        first, second = second, first
    layers, function = 0, nn.Module.__call__
    while (layer := layer_of(function)) is not None:
        layers, function = layers + 1, layer.below
    first.__exit__(None, None, None)
    assert layers == 1
