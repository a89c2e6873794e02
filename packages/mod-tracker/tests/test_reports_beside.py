"""Reports with concurrent threads and with other reports."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import mod_tracker

from ._small import MLP, leaf, linear, step

REPORTS = 8
LIMIT_S = 60


class _Beside(threading.Thread):
    """A thread that repeats a computation and records differing results."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.model, self.x = MLP(), leaf()
        self.expected = self.once()
        self.began, self.ends = threading.Semaphore(0), threading.Event()
        self.other, self.errors = 0, []

    def once(self):
        loss = self.model(self.x).sum()
        return torch.autograd.grad(loss, (self.x, *self.model.parameters()))

    def run(self):
        while not self.ends.is_set():
            try:
                found = self.once()
                self.other += not all(map(torch.equal, found, self.expected))
            except Exception as error:
                self.errors.append(f"{type(error).__name__}: {error}")
            self.began.release()


def _beside_reports(name):
    """Return the differences that a thread recorded while reports began and ended."""
    model, beside = MLP(), _Beside()
    beside.start()
    try:
        for _ in range(REPORTS):
            assert beside.began.acquire(timeout=LIMIT_S)
            with getattr(mod_tracker, name)(model):
                step(model, leaf())
    finally:
        beside.ends.set()
        beside.join()
    return beside.other, beside.errors[:1]


def _last_of(*names):
    """Open several reports and close them in the same order; return the last result."""
    model, x = MLP(), leaf()
    step(model, x)
    begun = [getattr(mod_tracker, name)() for name in names]
    reports = [context.__enter__() for context in begun]
    step(model, x)
    for context in begun[:-1]:
        context.__exit__(None, None, None)
    step(model, x)
    begun[-1].__exit__(None, None, None)
    return reports[-1].total


@pytest.mark.parametrize("name", ["profile_flops", "profile_memory", "watch_memory"])
def test_thread_that_computes_during_reports(name):
    """Values and gradients are the same, and nothing raises."""
    assert _beside_reports(name) == (0, [])


@pytest.mark.parametrize("first", ["profile_flops", "profile_memory", "watch_memory"])
@pytest.mark.parametrize("second", ["profile_flops", "profile_memory"])
def test_overlapping_report_gives_the_same_as_alone(first, second):
    """The second report of two overlapping ones has the same result as alone."""
    alone = _last_of(second)
    assert _last_of(first, second) == alone > 0


def test_memory_of_another_threads_model_is_left_out():
    """That model may be in a backward, and reading its gradients would be a race."""
    other, model = nn.Sequential(linear()), MLP()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)

    def train():
        step(other, leaf())
        optimizer.step()

    with mod_tracker.profile_memory() as report:
        step(model, leaf())
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
    assert list(report.rows) == ["MLP", "MLP.a", "MLP.b"]
    assert report.causes["parameters"] == report.causes["gradients"] == 2 * 16 * 4
    assert report.causes["optimizer"] == 0
