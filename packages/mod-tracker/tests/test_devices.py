"""Bytes of each device: peaks, limits and pages, beside torch's MemTracker."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.autograd.graph import save_on_cpu
from torch.distributed._tools.mem_tracker import MemTracker

from mod_tracker import profile_memory, trace, watch_memory

from ._small import shows_saved

UNIT = 64 * 32 * 4
"""Bytes of an activation."""

COPIES = 8 * UNIT + 3 * 32 * 32 * 4
"""Bytes on the host: a tensor that two nodes save is copied twice, and weights are, too."""


@pytest.fixture
def other():
    """A second device without an accelerator: the meta device, under a fake mode."""
    with FakeTensorMode():
        yield "meta"


def blocks(device):
    """Four layers, each with an activation."""
    layers = [nn.Sequential(nn.Linear(32, 32, device=device), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(*layers)


def plain(model, x):
    model(x).sum().backward()


def offloaded(model, x):
    with save_on_cpu():
        loss = model(x).sum()
    loss.backward()


@pytest.mark.parametrize("step", [plain, offloaded])
def test_peaks_are_those_of_torchs_tracker(other, step):
    """Of each device, with what was there before."""
    model, x = blocks(other), torch.randn(64, 32, device=other)
    theirs = MemTracker()
    theirs.track_external(model)
    with theirs:
        step(model, x)
    model.zero_grad()
    with profile_memory(model) as report:
        step(model, x)
    peaks = {str(d): each["Total"] for d, each in theirs.get_tracker_snapshot("peak").items()}
    peaks = {name: peak for name, peak in peaks.items() if peak}
    assert {name: sum(report.on(name).causes.values()) for name in report.devices} == peaks


@shows_saved
def test_offload_moves_bytes_to_the_host(other):
    """On the device less is alive; what is saved is on the host."""
    model, x = blocks(other), torch.randn(64, 32, device=other)
    reports = []
    for step in (plain, offloaded):
        model.zero_grad()
        with profile_memory(model) as report:
            step(model, x)
        reports.append(report)
    before, after = reports
    assert (before.device, before.devices) == ("meta", ("meta",))
    assert (after.device, after.devices) == ("meta", ("meta", "cpu"))
    assert after.peak < before.peak
    assert before.totals["saved"] == 5 * UNIT  # the input of each layer, and the last result
    assert after.totals["saved"] == 0
    assert after.on("cpu").totals["saved"] == after.on("cpu").peak == COPIES
    assert after.on("cpu")["0.0"].parameters == 0 < after["0.0"].parameters
    assert "peak on cpu: 77.8 kB; on('cpu') is its report" in str(after)
    assert after.to_dict()["other_devices"]["cpu"]["peak"] == COPIES


def test_limits_and_pages_are_of_one_device(other):
    model, x = blocks(other), torch.randn(64, 32, device=other)
    for limit, written in (
        (6 * UNIT, "cpu"),
        ({"cpu": 7 * UNIT}, "cpu"),
        ({"meta": UNIT}, "meta"),
        ({"cpu": 10 * UNIT, "cuda": 1}, None),
    ):
        with watch_memory(model, limit_bytes=limit) as watch:
            loss = None
            with save_on_cpu():
                loss = model(x).sum()
        assert loss.requires_grad
        assert [page.device for page in watch.pages] == ([] if written is None else [written])
        if written:
            assert f" on {written} is above the limit" in watch.pages[0].reason


def test_timeline_has_a_counter_for_each_device(other):
    model, x = blocks(other), torch.randn(64, 32, device=other)
    with trace(model, memory=True) as timeline:
        offloaded(model, x)
    counters = {}
    for event in timeline.events:
        if event["ph"] == "C":
            counters.setdefault(event["name"], []).append(event["args"]["live bytes"])
    assert max(counters["memory of cpu"]) == COPIES
    assert set(counters) == {"memory of cpu", "memory of meta"}
