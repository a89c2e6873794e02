"""Reports beside other threads and other reports."""

from __future__ import annotations

import json
import threading
import time

import pytest
import torch
from torch import nn

import mod_tracker


def linear():
    """A 4 x 4 layer without bias: each product has 2 * rows * 16 operations."""
    return nn.Linear(4, 4, bias=False)


def leaf():
    """An input that requires a gradient."""
    return torch.randn(2, 4, requires_grad=True)


def step(model, *args, **kwargs):
    """One forward and backward."""
    model(*args, **kwargs).sum().backward()


class MLP(nn.Module):
    """Two layers with a relu between them."""

    def __init__(self):
        super().__init__()
        self.a, self.b = linear(), linear()

    def forward(self, x):
        """Compute."""
        return self.b(self.a(x).relu())


REPORTS = 8
LIMIT_S = 60


class _Beside(threading.Thread):
    """Computes the same again and again, and notes what came out otherwise."""

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
    """What a thread noted while as many reports began and ended."""
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
    """What the last of these reports tells that end in the order in which they began."""
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


REST_S = 0.25
LARGE = 1 << 20


class _Stop(Exception):
    """Raised in the middle of a backward."""


def _stopped(again):
    """Stop a backward between two modules; `again`: run it once more, to its end."""
    first, second, stops = linear(), nn.Tanh(), [True]

    def hook(grad):
        if stops:
            raise _Stop

    hidden = first(leaf())
    hidden.register_hook(hook)
    loss = second(hidden).sum()
    with pytest.raises(_Stop):
        loss.backward(retain_graph=True)
    if again:
        stops.clear()
        loss.backward()


@pytest.mark.parametrize("name", ["profile_flops", "profile_memory", "watch_memory"])
def test_thread_that_computes_beside_reports(name):
    """The same values and gradients, and no error."""
    assert _beside_reports(name) == (0, [])


@pytest.mark.parametrize("first", ["profile_flops", "profile_memory", "watch_memory"])
@pytest.mark.parametrize("second", ["profile_flops", "profile_memory"])
def test_report_goes_on_after_one_that_began_before(first, second):
    """A step while both are open and one more, as under it alone."""
    alone = _last_of(second)
    assert _last_of(first, second) == alone > 0


@pytest.mark.parametrize("again", [False, True])
def test_time_after_a_backward_that_was_stopped(again):
    """A quarter of a second in which nothing runs is outside."""
    _stopped(again)  # first uses are not the subject
    with mod_tracker.profile_time() as report:
        _stopped(again)
        time.sleep(REST_S)
    assert {"Linear", "Tanh"} <= set(report.rows)
    assert report.outside.self_total > 0.9e9 * REST_S


@pytest.mark.parametrize("again", [False, True])
def test_trace_after_a_backward_that_was_stopped(again):
    """A megabyte is taken while no slice is open."""
    with mod_tracker.trace(memory=True) as report:
        _stopped(again)
        made = torch.ones(LARGE, dtype=torch.uint8)
    opened, slices, beside = [], 0, []
    for event in json.loads(report.to_json())["traceEvents"]:
        if event["ph"] == "B":
            opened.append(event["name"])
            slices += event["cat"] == "backward"
        elif event["ph"] == "E":
            opened.pop()
        elif event["ph"] == "C" and max(event["args"].values()) >= made.nbytes:
            beside.append(list(opened))
    assert slices
    assert beside
    assert not any(beside)
