"""Timelines: slices, the memory counter, and ranges for a profiler."""

from __future__ import annotations

import json
import os
import threading

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from mod_tracker import OptionError, trace
from mod_tracker._record import Path, outside
from mod_tracker.reports._trace import events_of


def test_trace_links_both_directions_of_a_call(mlp, x):
    """Forward and backward slices of a call have the same id; memory counters are present."""
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


def test_profiler_file_has_operators_below_their_modules(mlp, x, tmp_path):
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


def call_of(name, around=None, index=0):
    """Make a call of a module with this name inside another call."""
    outer = outside() if around is None else around
    return Path(lambda: None, parent=outer[0], name=name, called_as=name), index, outer


def test_events_are_in_order_of_time_and_in_microseconds():
    """Counters lie between slices; slices have the root's iteration and the call's id."""
    net = call_of("net", index=4)
    readings = [(1000, call_of("a", net, 2), "forward"), (3000, outside(), "outside")]
    events = events_of(readings, [(2000, "cpu", 64), (3000, "cpu", 0)])
    assert [(e["ph"], e["ts"], e["name"]) for e in events] == [
        *(("B", 1.0, "net"), ("B", 1.0, "a"), ("C", 2.0, "memory of cpu")),
        *(("E", 3.0, "a"), ("E", 3.0, "net"), ("C", 3.0, "memory of cpu")),
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


@pytest.mark.parametrize("ranges", ["", "nvtx", "NVTX", 1])
def test_ranges_that_cannot_be_emitted_are_refused(monkeypatch, ranges):
    """Such as NVTX without CUDA; no tracker is entered then."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    original = nn.Module.__call__
    with pytest.raises(OptionError, match=f"ranges must be .*; got {ranges!r}"):
        trace(ranges=ranges).__enter__()
    assert nn.Module.__call__ is original


@pytest.mark.parametrize("ranges", ["nvtx", "record_function"])
def test_ranges_are_ended_after_an_error_in_the_block(monkeypatch, mlp, ranges):
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
        mlp(torch.ones(2, 5))  # the layer expects another width
    assert log.count(1) == log.count(-1) > 1
