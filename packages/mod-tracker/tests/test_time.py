"""Clocks of the host and of devices: which are read, when, and in which thread."""

from __future__ import annotations

import threading
from itertools import count

import pytest
import torch
from torch import nn

from mod_tracker import OptionError, profile_time


@pytest.mark.parametrize(
    ("there", "says"),
    [(False, "'cpu'; there is no accelerator here"), (True, "'cpu', 'device' or 'meta'")],
)
def test_clock_of_a_device_that_is_not_there_is_refused(monkeypatch, there, says):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: there)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("meta"))
    with pytest.raises(OptionError) as error, profile_time(clock="cuda"):
        pass
    assert f"clock must be {says}; got 'cuda'" in str(error.value)


def test_modules_in_other_threads_are_not_timed(mlp, x):
    """Their time passes beside that of the thread that measures."""
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
    """A slow module has the time, in forward and in backward."""

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
    """A device's event, a quarter of a millisecond after the one before on any device."""

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
    """Devices called "meta" whose events are counted; the list has an entry per wait for one."""
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
    """Milliseconds become nanoseconds: one event per change, one wait, at the end."""
    mlp, x = mlp.to("meta"), x.to("meta")
    with profile_time(mlp, clock=clock) as report:
        mlp(x)
        assert device == []
    quarter = 250_000
    # Outside, MLP, a, MLP, b, MLP, outside: seven intervals.
    assert report.total == 7 * quarter
    assert report["MLP"].self_forward == 3 * quarter
    assert report["MLP.a"].forward == report["MLP.b"].forward == quarter
    assert (report.by_device, device) == ({"meta:0": 7 * quarter}, [0])


def test_device_is_found_at_its_first_module(device, mlp, x):
    mlp.b.to("meta")
    with profile_time(clock="device") as report:
        mlp.a(x)
        mlp.b(x.to("meta"))
    assert list(report.by_device) == ["meta:0"]
    assert report["Linear#2"].forward > 0
    assert report.total == report.sum("self_total") == report.by_device["meta:0"]


def test_module_that_is_moved_after_its_first_call_is_found(device, mlp, x):
    with profile_time(clock="device") as report:
        mlp(x)
        mlp.to("meta")
        mlp(x.to("meta"))
    assert list(report.by_device) == ["meta:0"]
    assert report["MLP.a"].forward > 0


def test_device_thread_switches_its_own_device_only(device, mlp, x):
    """Others go on with what the thread of the user runs."""
    mlp.a.to("meta")
    with profile_time(mlp, clock="device") as report:
        loss = mlp.b(x).sum()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    assert list(report.by_device) == ["meta:0", "meta:1"]
    assert report["MLP.b"].backward > 0
    assert report.total == report.sum("self_total")


def test_time_of_the_host_waits_for_no_device(device, mlp, x):
    """The default clock asks the device nothing."""
    with profile_time() as report:
        mlp(x)
    assert device == []
    assert report.total > 0
    assert report.by_device == {}


@pytest.mark.accelerator
@pytest.mark.parametrize("named", [True, False], ids=["before", "when called"])
def test_times_of_two_devices_are_those_of_their_modules(accelerator, named):
    if torch.accelerator.device_count() < 2:
        pytest.skip("needs two devices of one kind")
    kind = accelerator.type
    simulate = getattr(torch.get_device_module(kind), "simulate", None)
    least_ns = 1_000_000 if simulate else 0
    first = nn.Linear(4, 4).to(accelerator)
    second = nn.Bilinear(4, 4, 4).to(torch.device(kind, 1))
    roots = (nn.ModuleDict({"first": first, "second": second}),) * named
    if simulate:
        simulate(kernel_us=2000)
    try:
        with profile_time(*roots, clock="device") as report:
            y = first(torch.ones(4, 4).to(accelerator).requires_grad_())
            z = y.to(second.weight.device)
            second(z, z).sum().backward()
    finally:
        if simulate:
            simulate()
    assert sorted(report.by_device) == [f"{kind}:0", f"{kind}:1"]
    assert report.total == report.sum("self_total") == sum(report.by_device.values())
    assert min(report.by_device.values()) > 2 * least_ns
    names = ("ModuleDict.first", "ModuleDict.second") if named else ("Linear", "Bilinear")
    assert report[names[0]].forward > least_ns
    assert report[names[1]].forward > least_ns
    assert report[names[1]].backward > least_ns


@pytest.mark.accelerator
def test_graph_capture_takes_no_time(accelerator, mlp, x):
    api = torch.get_device_module(accelerator)
    graph_type = getattr(api, "CUDAGraph", getattr(api, "Graph", None))
    if graph_type is None:
        pytest.skip("needs an accelerator with graphs")
    mlp, x = mlp.to(accelerator), x.to(accelerator)
    side = torch.Stream(accelerator)  # libraries begin what cannot begin in a capture
    with side:
        mlp(x)
    side.synchronize()
    graph = graph_type()
    with profile_time(mlp, clock="device") as report:
        with api.graph(graph):
            out = mlp(x)
        graph.replay()
    assert out.cpu().shape == mlp(x).shape
    assert list(report.by_device) == [f"{accelerator.type}:0"]
    with pytest.raises(KeyError):  # no row, as it took no time
        report["MLP"]
