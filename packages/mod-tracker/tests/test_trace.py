"""Timelines: slices, the memory counter, and ranges for a profiler."""

from __future__ import annotations

import json

import torch
from torch.profiler import ProfilerActivity, profile

from mod_tracker import trace


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
