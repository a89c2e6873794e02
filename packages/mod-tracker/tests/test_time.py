"""Clocks of the host and of devices: which are read, when, and in which thread."""

from __future__ import annotations

import threading
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mod_tracker import OptionError, profile_time


@pytest.mark.parametrize(
    ("there", "says"),
    [(False, "'cpu', since this machine has no accelerator"), (True, "'cpu', 'device' or 'meta'")],
)
def test_clock_of_a_missing_device_is_refused(monkeypatch, there, says):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: there)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("meta"))
    with pytest.raises(OptionError) as error, profile_time(clock="cuda"):
        pass
    assert f"clock must be {says}; got 'cuda'" in str(error.value)


def test_modules_in_other_threads_are_not_timed(mlp, x):
    """Their time overlaps with that of the measured thread."""
    with profile_time() as report:
        thread = threading.Thread(target=lambda: nn.Sequential(nn.ReLU())(torch.ones(1)))
        thread.start()
        thread.join()
        mlp(x)
    assert set(report.rows) == {"MLP", "MLP.a", "MLP.b"}


def test_backward_in_a_thread_of_torchs_own_is_timed(mlp, x):
    with profile_time() as report:
        loss = mlp(x).sum()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    assert report["MLP.a"].backward > 0


@pytest.mark.parametrize("again", [False, True])
def test_time_after_a_backward_that_failed_is_outside(clock, again):
    model, fails = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), [True]

    def hook(grad):
        if fails[0]:
            raise ValueError("stopped")

    with profile_time() as report:
        hidden = model[0](torch.ones(2, 4, requires_grad=True))
        hidden.register_hook(hook)
        out = model[1](hidden).sum()
        with pytest.raises(ValueError, match="stopped"):
            out.backward(retain_graph=True)
        if again:
            fails[0] = False
            out.backward()
        clock.passes(50)
    assert {row.backward for row in report if row.name} == {0}
    assert report.outside.self_total == 50


def test_slow_module_has_the_time(clock):
    """The module that advances the clock gets the time, in forward and in backward."""

    class Slow(nn.Module):
        def forward(self, x):
            clock.passes(20)
            y = x * 2
            y.register_hook(lambda grad: clock.passes(30))
            return y * 1

    model = nn.Sequential(nn.Identity(), Slow(), nn.Identity())
    with profile_time() as report:
        model(torch.ones(1, requires_grad=True)).sum().backward()
    slow = report["Sequential.1"]
    assert (slow.forward, slow.backward, slow.total) == (20, 30, 50)
    assert report["Sequential.0"].total == 0


class Event:
    """A device event, a quarter of a millisecond after the previous one on any device."""

    ticks = count()

    def __init__(self, device, *, enable_timing):
        assert enable_timing
        self.device, self.at = device, None

    def record(self, stream):
        assert stream == ("stream", self.device)
        self.at = next(self.ticks)

    def elapsed_time(self, end):
        assert end.device == self.device
        return (end.at - self.at) * 0.25


@pytest.fixture
def device(monkeypatch):
    """Fake devices called "meta" that count events; the list has one entry per synchronization."""
    waits, accelerator = [], torch.accelerator
    monkeypatch.setattr(accelerator, "is_available", lambda: True)
    monkeypatch.setattr(accelerator, "current_accelerator", lambda: torch.device("meta"))
    monkeypatch.setattr(accelerator, "current_stream", lambda device: ("stream", device))
    monkeypatch.setattr(accelerator, "synchronize", waits.append)
    monkeypatch.setattr(accelerator, "current_device_index", lambda: 1)
    monkeypatch.setattr(torch, "Event", Event)
    Event.ticks = count()
    return waits


@pytest.mark.parametrize("clock", ["device", "meta"])
def test_time_of_a_device_is_that_between_its_events(device, mlp, x, clock):
    """Milliseconds become nanoseconds: one event per change, one synchronization at the end."""
    mlp, x = mlp.to("meta"), x.to("meta")
    with profile_time(mlp, clock=clock) as report:
        mlp(x)
        assert device == []
    quarter = 250_000
    # Outside, MLP, a, MLP, b, MLP, outside: seven intervals.
    assert report.total == 7 * quarter
    assert report["MLP"].self_forward == 3 * quarter
    assert report["MLP.a"].forward == report["MLP.b"].forward == quarter
    assert device == [torch.device("meta")]


def test_device_without_roots_is_the_current_one(device, mlp, x):
    with profile_time(clock="device") as report:
        mlp(x)
    assert device == [torch.device("meta", 1)]
    assert report["MLP.a"].forward > 0


def test_model_on_two_devices_is_refused(device, mlp):
    for index, layer in enumerate((mlp.a, mlp.b)):  # a tensor on "meta" has no index
        layer._parameters["weight"] = SimpleNamespace(device=torch.device("meta", index))
    with (
        pytest.raises(OptionError, match="the model is on meta:0, meta:1"),
        profile_time(mlp, clock="device"),
    ):
        pass


def test_time_of_the_host_waits_for_no_device(device, mlp, x):
    """The default clock makes no call to a device."""
    with profile_time() as report:
        mlp(x)
    assert device == []
    assert report.total > 0
