"""Time: the clock of a device, and which threads are followed."""

from __future__ import annotations

import threading
from itertools import count

import pytest
import torch
from torch import nn

from mod_tracker import OptionError, profile_time
from mod_tracker.reports._time import TimeReport


class Event:
    """A device's event, a quarter of a millisecond after the one before."""

    ticks = count()

    def __init__(self, *, enable_timing):
        assert enable_timing
        self.at = None

    def record(self):
        self.at = next(self.ticks)

    def elapsed_time(self, end):
        return (end.at - self.at) * 0.25


@pytest.fixture
def device(monkeypatch):
    """A device whose events are counted; the list has an entry per wait for it."""
    waits = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(None))
    return waits


def test_time_of_a_device_is_that_between_its_events(device, mlp, x):
    """Milliseconds become nanoseconds: one event per change, one wait, at the end."""
    with profile_time(clock="cuda") as report:
        mlp(x)
        assert device == []
    quarter = 250_000
    # Outside, MLP, a, MLP, b, MLP, outside: seven intervals.
    assert report.total == 7 * quarter
    assert report["MLP"].self_forward == 3 * quarter
    assert report["MLP.a"].forward == report["MLP.b"].forward == quarter
    assert len(device) == 1


def test_time_of_the_host_waits_for_no_device(device, mlp, x):
    """The default clock asks the device nothing."""
    with profile_time() as report:
        mlp(x)
    assert device == []
    assert report.total > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_clock_of_a_device_that_is_not_there_is_refused():
    """As text, before anything is measured."""
    with pytest.raises(OptionError) as error, profile_time(clock="cuda"):
        pass
    assert str(error.value) == (
        "mod_tracker.profile_time: clock 'cuda' needs a CUDA device, but there is none. "
        "Use clock='cpu'."
    )


def test_modules_in_other_threads_are_not_timed(mlp, x):
    """Their time passes beside that of the thread that measures."""
    with profile_time() as report:
        thread = threading.Thread(target=lambda: nn.Sequential(nn.ReLU())(torch.ones(1)))
        thread.start()
        thread.join()
        mlp(x)
    assert set(report.rows) == {"MLP", "MLP.a", "MLP.b"}


def test_backward_in_a_thread_of_torchs_own_is_timed(mlp, x):
    """A thread that runs no module of its own is followed, wherever it runs a backward."""
    with profile_time() as report:
        loss = mlp(x).sum()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    assert report["MLP.a"].backward > 0


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 ns"),
        (999, "999 ns"),
        (1000, "1 us"),
        (-1500, "-1.5 us"),
        (999_000, "999 us"),
        (10**6, "1 ms"),
        (10**9, "1 s"),
        (2 * 10**12, "2e+03 s"),
    ],
)
def test_times_have_the_unit_that_fits(value, text):
    """A unit begins where there is one of it."""
    assert TimeReport().show(value) == text
