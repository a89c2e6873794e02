"""Reports: what each adds to the laws, and the ways to write one."""

from __future__ import annotations

import csv
import io
import json

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.profiler import ProfilerActivity, profile

from mod_tracker import ModTracker, profile_flops, profile_memory, profile_time, trace
from mod_tracker._attribution import Attribution
from mod_tracker.reports._memory import _Saved

REPORTS = [profile_flops, profile_time, profile_memory, trace]


def step(model, x):
    """One forward and backward."""
    model(x).sum().backward()


@pytest.mark.parametrize("report_of", REPORTS)
def test_every_report_can_be_written_in_every_way(report_of, mlp, x):
    """Table, JSON, CSV, rich; the difference to itself is zero everywhere."""
    with report_of(mlp) as report:
        step(mlp, x)
    lines = report.table(limit=1).splitlines()
    assert len(lines) == 6
    assert lines[3].startswith("(outside)")
    assert json.loads(report.to_json())
    names = [row["name"] for row in csv.DictReader(io.StringIO(report.to_csv()))]
    assert set(names) == {"(outside)", "MLP", "MLP.a", "MLP.b"}
    assert report.__rich__().row_count == len(report.table().splitlines()) - 4
    same = report.diff(report)
    assert same.total == 0
    assert all(getattr(row, column) == 0 for row in same for column in same.columns)
    assert len(report) == 3


def test_difference_counts_missing_modules_as_zero(x):
    """A module that only one report has appears with its sign."""
    reports = []
    for model in (nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))):
        with profile_flops() as report:
            model(x)
        reports.append(report)
    small, large = reports
    assert large.diff(small)["Sequential.1"].forward == 64
    assert small.diff(large)["Sequential.1"].forward == -64
    assert large.diff(small).total == 64


def test_top_rows_are_those_with_the_largest_values(x):
    """Of the column that is asked for, or the one the report sorts by; as many as are asked for."""
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 64, bias=False))
    with profile_flops() as report:
        model(x).sum().backward()
    assert [row.name for row in report.top(2)] == ["Sequential", "Sequential.1"]
    assert [row.name for row in report.top(3, by="self_forward")] == [
        "Sequential.1",
        "Sequential.0",
        "Sequential",
    ]


def test_report_is_complete_after_an_error_only_if_the_block_ends(mlp, x):
    """An exception in the block goes through, and the tracker is gone."""
    original = nn.Module.__call__
    for report_of in REPORTS:
        with pytest.raises(ZeroDivisionError), report_of():
            mlp(x)
            raise ZeroDivisionError
        assert nn.Module.__call__ is original


def test_flops_in_inference_mode_are_those_of_the_parts(x):
    """Composite operators, which arrive whole there, are decomposed and counted."""
    with torch.inference_mode(), profile_flops() as report:
        nn.Linear(4, 4)(x.detach())
    assert report["Linear"].forward == 64


def test_what_follows_a_backward_that_makes_a_graph_is_outside(x):
    """The last module of that backward gets nothing of what comes after it."""
    model, weight = nn.Linear(4, 4, bias=False), torch.ones(4, 4, requires_grad=True)
    with profile_flops() as report:
        (grad,) = torch.autograd.grad((model(x) ** 2).sum(), x, create_graph=True)
        (grad @ weight).sum().backward()
    product = 2 * len(x) * 4 * 4
    assert (report.outside.forward, report.outside.backward) == (product, 2 * product)


class RunsABackward(nn.Module):
    """Its last node, that of a change in place, is made just before another one's backward."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, x, other, grad):
        y = x * 1
        y[:].addmm_(x, self.weight)
        other.backward(grad)
        return y


def test_a_node_made_before_another_modules_backward_is_its_makers(x):
    """A backward inside a forward takes none of the nodes around it."""
    layer, module = nn.Linear(4, 4, bias=False), RunsABackward()
    with profile_flops() as report:
        module(x, layer(x), torch.ones(len(x), 4)).sum().backward()
    product = 2 * len(x) * 4 * 4
    assert report["RunsABackward"].self_backward == 2 * product
    assert report["Linear"].self_backward == 2 * product


def test_flops_of_different_shapes_are_not_mixed_up():
    """The count kept per shape is used for that shape only."""
    layer = nn.Linear(4, 4, bias=False)
    with profile_flops() as report:
        for rows in (1, 2, 3, 2, 1):
            layer(torch.ones(rows, 4))
    assert report["Linear"].forward == 2 * 16 * (1 + 2 + 3 + 2 + 1)


def test_flops_list_operators(x):
    """By operator, with and without a formula."""
    with profile_flops() as report:
        nn.Sequential(nn.Linear(4, 4), nn.ReLU())(x)
    assert report.by_operator == {"aten.addmm.default": 64}
    assert report.uncounted["aten.relu.default"] == 1
    assert report.to_dict()["uncounted"] == report.uncounted


def test_time_is_spent_where_it_passes():
    """A slow module has the time, in forward and in backward."""
    import time

    class Slow(nn.Module):
        def forward(self, x):
            time.sleep(0.01)
            y = x * 2
            y.register_hook(lambda grad: time.sleep(0.01))
            return y * 1

    model = nn.Sequential(nn.Identity(), Slow(), nn.Identity())
    with profile_time() as report:
        step(model, torch.ones(1, requires_grad=True))
    slow = report["Sequential.1"]
    assert slow.forward >= 10_000_000
    assert slow.backward >= 10_000_000
    assert report["Sequential.0"].total < 10_000_000


def test_saved_bytes_are_what_autograd_keeps():
    """relu keeps its result; a layer keeps its input, and its weight, which does not count."""
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.ReLU())
    with profile_memory(model) as report:
        step(model, torch.randn(2, 4, requires_grad=True))
    assert report["Sequential.0"].saved == 2 * 4 * 4
    assert report["Sequential.1"].saved == 2 * 8 * 4
    assert report["Sequential"].saved == 2 * 4 * 4 + 2 * 8 * 4


def test_saved_bytes_count_once_until_the_last_use_ends():
    """A tensor saved again while something keeps it still is the same one."""
    saved, tensor = _Saved(Attribution(limit=9)), torch.ones(4)
    first, second = saved.pack(tensor), saved.pack(tensor)
    del first
    third = saved.pack(tensor)
    assert saved.totals(set()).total == 16
    del second, third
    assert saved.pack(tensor).tensor is tensor
    assert saved.totals(set()).total == 32


def test_checkpointing_saves_only_the_input(checkpointed):
    """The inner layers of a checkpointed part keep nothing in forward."""
    model = checkpointed(use_reentrant=True)
    with profile_memory(model) as report:
        output = model(torch.randn(2, 4, requires_grad=True))
    assert report["Checkpointed.m.b"].saved == 0
    assert report["Checkpointed"].saved == 2 * (2 * 4 * 4)
    assert output.requires_grad


def test_freed_bytes_are_charged_where_they_are_freed():
    """What a module allocates and drops itself leaves no delta, but a peak."""

    class Scratch(nn.Module):
        def forward(self, x):
            (x + 1).sum()
            return x

    with torch.no_grad(), profile_memory() as report:
        nn.Sequential(Scratch())(torch.zeros(1000))
    row = report["Sequential.0"]
    assert (row.allocated, row.delta) == (4004, 0)
    assert row.peak == report.peak == 4000 + 4004


def test_static_bytes_and_optimizer_state(mlp, x):
    """Parameters, gradients and state, each with its module."""
    optimizer = torch.optim.SGD(mlp.parameters(), lr=0.1, momentum=0.9)
    with profile_memory(mlp, optimizer=optimizer) as report:
        step(mlp, x)
        optimizer.step()
    row = report["MLP.a"]
    assert (row.parameters, row.gradients, row.optimizer) == (64, 64, 64)
    assert report["MLP"].parameters == 128


def test_module_that_never_ran_has_only_its_parameters(mlp):
    """No peak, nothing allocated and nothing saved; what it holds counts nevertheless."""
    with profile_memory(mlp) as report:
        pass
    row = report["MLP.a"]
    assert (row.peak, row.allocated, row.freed, row.saved) == (0, 0, 0, 0)
    assert (row.self_allocated, row.self_freed, row.self_saved) == (0, 0, 0)
    assert (row.self_parameters, row.parameters) == (64, 64)


def test_tied_parameter_counts_once(x):
    """A shared parameter is charged where it is registered first."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    with profile_memory(model) as report:
        step(model, x)
    assert report.totals["parameters"] == report["Sequential.0"].parameters == 64


def test_memory_of_fake_tensors_is_that_of_real_ones(checkpointed):
    """Without data, the same bytes."""

    def measure():
        model = checkpointed(use_reentrant=False)
        with profile_memory(model) as report:
            step(model, torch.randn(2, 4, requires_grad=True))
        return report.to_dict()

    with FakeTensorMode():
        fake = measure()
    assert fake == measure()


def test_trace_links_both_directions_of_a_call(mlp, x):
    """Forward and backward slices of a call have the same id; the counter is there."""
    with trace(memory=True) as report:
        for _ in range(2):
            step(mlp, x)
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
        step(mlp, x)
    names = {event.name for event in profiler.events()}
    assert {"MLP.a [forward]", "MLP.a [backward]"} <= names


def test_trace_emits_nvtx_ranges(monkeypatch, mlp, x):
    """As many pops as pushes, and never more."""
    log = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: log.append(1))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: log.append(-1))
    with trace(ranges="nvtx", memory=False):
        step(mlp, x)
    depths = [sum(log[: end + 1]) for end in range(len(log))]
    assert min(depths) == depths[-1] == 0
    assert len(log) > 8


def test_reports_may_be_nested_in_each_other_and_in_a_tracker(mlp, x):
    """Each sees what it sees alone."""
    with profile_flops() as alone:
        step(mlp, x)
    with ModTracker(), profile_time(), profile_flops() as inside, profile_memory():
        step(mlp, x)
    assert inside.rows == alone.rows


def test_memory_of_a_module_that_overrides_its_listings(x):
    """What a module registers is read from its tables, not by methods it may override."""

    class Closed(nn.Linear):
        def named_modules(self, *args, **kwargs):
            raise ZeroDivisionError

        named_children = named_parameters = parameters = buffers = modules = named_modules

    model = nn.Sequential(Closed(4, 4))
    with profile_memory(model) as report:
        step(model, x)
    assert report["Sequential.0"].parameters == 80
