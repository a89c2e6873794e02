"""Timelines: slices, the memory counter, and ranges for a profiler."""

from __future__ import annotations

import json
import os
import threading
from functools import partial

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from mod_tracker import OptionError, trace
from mod_tracker._record import Path, outside
from mod_tracker.reports._trace import Slices, events_of


def test_trace_links_both_directions_of_a_call(mlp, x):
    """Forward and backward slices of a call have the same id; the counter is there."""
    with trace(memory=True) as report:
        for _ in range(2):
            mlp(x).sum().backward()
    begins = [event for event in report.events if event["ph"] == "B"]
    calls = {
        phase: {e["args"]["call"] for e in begins if e["cat"] == phase}
        for phase in ("forward", "backward")
    }
    assert calls["forward"] == calls["backward"]
    assert "MLP.a@1.1" in calls["forward"]
    assert any(e["ph"] == "C" and e["args"]["live bytes"] > 0 for e in report.events)
    assert report.to_json() == json.dumps({"traceEvents": report.events, "displayTimeUnit": "ms"})


def test_trace_emits_record_function_ranges(mlp, x):
    """The profiler sees a range per slice."""
    cpu = profile(activities=[ProfilerActivity.CPU], acc_events=True)  # without: 2.11 may warn
    with cpu as profiler, trace(ranges="record_function"):
        mlp(x).sum().backward()
    names = {event.name for event in profiler.events()}
    assert {"MLP.a [forward]", "MLP.a [backward]"} <= names


def test_file_of_the_profiler_has_operators_below_the_modules_that_ran_them(mlp, x, tmp_path):
    """In forward and in backward: each product lies in time within the range of its module."""
    cpu, file = profile(activities=[ProfilerActivity.CPU], acc_events=True), tmp_path / "trace.json"
    with cpu as profiler, trace(ranges="record_function"):
        mlp(x).sum().backward()
    profiler.export_chrome_trace(str(file))
    events = [e for e in json.loads(file.read_text())["traceEvents"] if e.get("ph") == "X"]

    def products_in(name):
        (around,) = (e for e in events if e["name"] == name)
        end = around["ts"] + around["dur"]
        inside = (e for e in events if around["ts"] <= e["ts"] and e["ts"] + e["dur"] <= end)
        return sum(e["name"] in ("aten::addmm", "aten::mm") for e in inside)

    for name in ("MLP.a", "MLP.b"):
        assert products_in(f"{name} [forward]") == 1
        assert products_in(f"{name} [backward]") == 2


def test_trace_emits_nvtx_ranges(monkeypatch, mlp, x):
    """As many pops as pushes, and never more."""
    log = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: log.append(1))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: log.append(-1))
    with trace(ranges="nvtx", memory=False):
        mlp(x).sum().backward()
    depths = [sum(log[: end + 1]) for end in range(len(log))]
    assert min(depths) == depths[-1] == 0
    assert len(log) > 8


def call_of(name, around=None, index=0):
    """A call of a module of this name inside another one."""
    outer = outside() if around is None else around
    return Path(lambda: None, parent=outer[0], name=name, called_as=name), index, outer


class Written:
    """Slices that write down what begins and ends, and fail at an end when told to."""

    def __init__(self):
        self.log, self.fails = [], False
        self.slices = Slices(partial(self.write, "+"), partial(self.write, "-"))

    def write(self, sign, now_ns, frame):
        """Write one down."""
        if self.fails and sign == "-":
            raise KeyboardInterrupt
        self.log.append(f"{sign}{frame[0][0].name}:{frame[1]}@{now_ns}")


def test_slices_end_up_to_what_stacks_have_in_common():
    """And begin from there; the same call in another phase is another slice."""
    written, net = Written(), call_of("net")
    first, second = call_of("a", net), call_of("b", net)
    for now_ns, (call, phase) in enumerate(
        [(first, "forward"), (second, "forward"), (second, "forward"), (net, "backward")]
    ):
        written.slices.switch(now_ns, call, phase)
    written.slices.switch(9, outside(), "outside")
    assert written.log == [
        *("+net:forward@0", "+a:forward@0", "-a:forward@1", "+b:forward@1"),
        *("-b:forward@3", "-net:forward@3", "+net:backward@3", "-net:backward@9"),
    ]


def test_calls_alike_are_slices_of_their_own():
    """Two calls of one module are told apart by the call, not by its name."""
    written, net = Written(), call_of("net")
    path = call_of("a", net)[0]
    for now_ns in (0, 1):
        written.slices.switch(now_ns, (path, now_ns, net), "forward")
    assert written.log[2:] == ["-a:forward@1", "+a:forward@1"]


def test_slice_whose_end_is_interrupted_is_ended_later():
    """It stays open until its end has been told, and is ended once."""
    written, net = Written(), call_of("net")
    written.slices.switch(0, call_of("a", net), "forward")
    written.fails = True
    with pytest.raises(KeyboardInterrupt):
        written.slices.switch(1, net, "forward")
    written.fails = False
    written.slices.close()
    written.slices.close()
    assert [line.split("@")[0] for line in written.log[2:]] == ["-a:forward", "-net:forward"]


def test_events_are_in_order_of_time_and_in_microseconds():
    """Counters between slices; with the iteration of the root, and the call in it."""
    net = call_of("net", index=4)
    readings = [(1000, call_of("a", net, 2), "forward"), (3000, outside(), "outside")]
    events = events_of(readings, [(2000, 64), (3000, 0)])
    assert [(e["ph"], e["ts"], e["name"]) for e in events] == [
        *(("B", 1.0, "net"), ("B", 1.0, "a"), ("C", 2.0, "memory")),
        *(("E", 3.0, "a"), ("E", 3.0, "net"), ("C", 3.0, "memory")),
    ]
    assert events[1]["args"] == {
        "call": "a@4.2",
        "phase": "forward",
        "iteration": 4,
        "call_index": 2,
    }
    assert {(e["pid"], e["tid"]) for e in events} == {(os.getpid(), threading.get_native_id())}
    assert events[2]["args"] == {"live bytes": 64}
    assert events_of([], []) == []


def test_events_are_made_once_and_not_before_the_end(mlp, x):
    """Inside the block there are none; a difference has none either."""
    with trace() as report:
        mlp(x)
        assert report.events == []
    assert report.events is report.events
    assert {event["ph"] for event in report.events} == {"B", "E"}
    assert report.diff(report).events == []


@pytest.mark.parametrize("ranges", ["", "nvtx", "NVTX", 1])
def test_ranges_that_cannot_be_emitted_are_refused(monkeypatch, ranges):
    """NVTX without its device among them; nothing is tracked then."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    original = nn.Module.__call__
    with pytest.raises(OptionError) as error, trace(ranges=ranges):
        pass
    assert str(error.value) == (
        f"mod_tracker.trace: ranges {ranges!r} cannot be emitted, but it must be None, "
        "'record_function', or, with a CUDA device, 'nvtx'. Leave it out for none."
    )
    assert nn.Module.__call__ is original


@pytest.mark.parametrize("ranges", ["nvtx", "record_function"])
def test_ranges_are_ended_after_an_error_in_the_block(monkeypatch, mlp, ranges):
    """Also where a module was left by one."""
    log = []

    class Range:
        def __init__(self, name):
            self.name = name

        def __enter__(self):
            log.append(1)

        def __exit__(self, *error):
            log.append(-1)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: log.append(1))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: log.append(-1))
    monkeypatch.setattr(torch.profiler, "record_function", Range)
    with pytest.raises(RuntimeError), trace(ranges=ranges):
        mlp(torch.ones(2, 5))  # of another width than the layer's
    assert log.count(1) == log.count(-1) > 1


@pytest.mark.parametrize("times", [1, 2, 3])
def test_ranges_that_interrupts_left_open_are_ended(monkeypatch, mlp, x, times):
    """At the ends of modules, and at that of the block."""
    log, interrupts = [], [KeyboardInterrupt] * times

    def pop():
        if interrupts:
            raise interrupts.pop()
        log.append(-1)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: log.append(1))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", pop)
    with pytest.raises(KeyboardInterrupt), trace(ranges="nvtx"):
        mlp(x)
    assert interrupts == []
    assert log.count(1) == log.count(-1) > 0
