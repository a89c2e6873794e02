"""Rows of a report, the format of its numbers, and its output formats."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mod_tracker import (
    ModTracker,
    StateError,
    UnknownNameError,
    profile_flops,
    profile_memory,
    profile_time,
    trace,
)
from mod_tracker.reports._flame_page import flame_page
from mod_tracker.reports._flops import FlopReport
from mod_tracker.reports._rows import PhaseRow

from ._small import shows_saved

PHASES = ["forward", "recompute", "backward"]
REPORTS = [profile_flops, profile_time, profile_memory, trace]


def filled(kind, totals):
    """A report with the given forward amount of each module."""
    report = kind()
    rows = {
        name: PhaseRow(name or "(outside)", self_forward=amount, forward=amount)
        for name, amount in {**totals, "": 5}.items()
    }
    report._fill(rows, sum(totals.values()) + 5)
    return report


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 FLOP"),
        (999, "999 FLOP"),
        (1000, "1 kFLOP"),
        (-2500, "-2.5 kFLOP"),
        (999_000, "999 kFLOP"),
        (10**6, "1 MFLOP"),
        (999 * 10**6, "999 MFLOP"),
        (10**9, "1 GFLOP"),
        (999 * 10**9, "999 GFLOP"),
        (10**12, "1 TFLOP"),
    ],
)
def test_numbers_have_the_prefix_that_fits(value, text):
    """A prefix is used from one unit on."""
    assert FlopReport().show(value) == text


def test_scalars_are_flat_and_have_their_unit_in_the_name():
    """Names have module, column and unit; unused columns and the sum are included."""
    found = filled(FlopReport, {"Net.0": 7}).scalars()
    assert found == {
        **{f"Net.0/{column}_flops": 7.0 for column in ("self_total", "forward", "total")},
        **{f"outside/{column}_flops": 5.0 for column in ("self_total", "forward", "total")},
        **{
            f"{name}/{phase}_flops": 0.0
            for name in ("Net.0", "outside")
            for phase in ("recompute", "backward")
        },
        "total_flops": 12.0,
        "Net.0/calls": 0.0,
    }
    assert {type(value) for value in found.values()} == {float}


@pytest.mark.parametrize(
    ("limit", "names"), [(0, []), (1, ["b"]), (2, ["b", "c"]), (3, ["b", "c", "a"])]
)
def test_largest_modules_are_kept_and_the_others_counted(limit, names):
    """The outside and the sum are always included; without omissions no count is added."""
    report = filled(FlopReport, {"a": 1, "b": 3, "c": 2})
    found = report.scalars(limit=limit)
    modules = [name.partition("/")[0] for name in found if "/forward" in name]
    assert modules == [*names, "outside"]
    assert found["total_flops"] == 11
    assert found.get("modules_left_out", 0.0) == 3 - len(names)
    assert ("modules_left_out" in found) == (limit < 3)


def test_difference_counts_missing_modules_as_zero(x):
    """A row that only one report has keeps its amount, with its sign."""
    reports = []
    for model in (nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))):
        with profile_flops() as report:
            model(x)
        reports.append(report)
    small, large = reports
    assert large.diff(small)["Sequential.1"].forward == 64
    assert small.diff(large)["Sequential.1"].forward == -64
    assert large.diff(small).total == 64


def numbers_in(value):
    """All numbers in nested dicts and lists."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [number for each in value for number in numbers_in(each)]
    return [value] if isinstance(value, (int, float)) else []


@pytest.mark.parametrize("report_of", REPORTS)
def test_every_figure_of_a_difference_is_a_difference(report_of, mlp):
    """A report minus itself has zeros only, and minus a smaller one those of both."""
    reports = []
    for size in (8, 2):
        with report_of(mlp) as report:
            mlp(torch.ones(size, 4)).sum().backward()
        reports.append(report)
    large, small = reports
    assert set(numbers_in(large.diff(large).to_dict())) == {0}
    assert large.diff(small).total == large.total - small.total


def test_flop_figures_of_a_difference(mlp):
    reports = []
    for size in (8, 2):
        with profile_flops(mlp) as report:
            mlp(torch.ones(size, 4)).sum().backward()
        reports.append(report)
    large, small = reports
    found = large.diff(small)
    assert found.model_flops == large.model_flops - small.model_flops != 0
    assert found.by_operator == {"aten.mm.default": found.total}


@shows_saved
def test_memory_figures_of_a_difference(mlp):
    reports = []
    for size in (8, 2):
        with profile_memory(mlp) as report:
            mlp(torch.ones(size, 4)).sum().backward()
        mlp.zero_grad()
        reports.append(report)
    large, small = reports
    found = large.diff(small)
    assert found.peak == large.peak - small.peak != 0
    assert found.totals["saved"] == large.totals["saved"] - small.totals["saved"] != 0
    assert found.causes == {name: large.causes[name] - small.causes[name] for name in found.causes}
    assert found.on("cpu") is found


@pytest.mark.parametrize(
    ("report_of", "ask"),
    [
        (profile_flops, lambda report: report.mfu(1e9, 1.0)),
        (profile_flops, lambda report: report.hfu("H100", 1.0)),
        (trace, lambda report: report.events),
        (trace, lambda report: report.to_json()),
        (profile_memory, lambda report: report.to_html()),
    ],
)
def test_what_a_difference_cannot_have_is_an_error(report_of, ask, mlp, x):
    with report_of(mlp) as report:
        mlp(x).sum().backward()
    with pytest.raises(StateError, match="a difference has no"):
        ask(report.diff(report))


@pytest.mark.parametrize("report_of", REPORTS)
def test_calls_are_those_in_forward(report_of, checkpointed):
    """A recomputation is no call; a module that was freed in the block keeps its calls."""
    model = checkpointed(use_reentrant=False)
    with report_of(model) as report:
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
        nn.Sequential(nn.Linear(4, 4))(torch.ones(1, 4))
    rows = {name: report[name].calls for name in ("m", "m.a", "out", "Checkpointed")}
    assert rows == dict.fromkeys(rows, 3)
    assert report["Sequential.0"].calls == 1
    assert "calls" in str(report).splitlines()[0]


def test_sum_over_modules_that_match_counts_nothing_twice(x):
    """Each stage of a pipeline is a separate model."""
    stages = [nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.ReLU()) for _ in range(2)]
    with profile_flops() as report:
        for stage in stages:
            x = stage(x)
    assert report.sum("forward", "*") == report.sum("self_forward") == report.total == 2 * 64
    assert report.sum("forward", "0") == report.sum("forward", "0", "0.0") == 2 * 64
    assert report.sum("forward", "Sequential#2.*") == 64
    assert report.sum("forward", "nothing") == 0


def test_top_rows_are_those_with_the_largest_values(x):
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 64, bias=False))
    with profile_flops() as report:
        model(x).sum().backward()
    assert [row.name for row in report.top(2)] == ["Sequential", "Sequential.1"]
    assert [row.name for row in report.top(3, by="self_forward")] == [
        "Sequential.1",
        "Sequential.0",
        "Sequential",
    ]


def test_reports_may_be_nested_in_each_other_and_in_a_tracker(mlp, x):
    with profile_flops() as alone:
        mlp(x).sum().backward()
    with ModTracker(), profile_time(), profile_flops() as inside, profile_memory():
        mlp(x).sum().backward()
    assert inside.rows == alone.rows


@pytest.mark.parametrize("report_of", REPORTS)
def test_printed_report_is_its_table(report_of, mlp, x):
    with report_of(mlp) as report:
        mlp(x).sum().backward()
    assert str(report) == report.table()
    assert "MLP.a" in str(report)


def test_row_of_a_module_counts_the_modules_inside_it(x):
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 64, bias=False))
    with profile_flops() as report:
        model(x)
    whole = report["Sequential"]
    assert (whole.total, whole.self_total) == (report["0"].total + report["1"].total, 0)
    header, _, first, *_ = str(report).splitlines()
    assert header.split() == ["module", "calls", "total", *PHASES, "self"]
    assert first.split()[:4] == ["Sequential", "1", "2.18", "kFLOP"]


def test_row_is_found_by_the_name_in_the_state_dict(x):
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.ReLU())
    with profile_flops() as report:
        model(x)
    assert report["0.0"] is report["Sequential.0.0"]
    for name, said in (("0.O", "names: 0.0"), ("Sequentiel.0", "names: Sequential.0")):
        with pytest.raises(UnknownNameError, match=said):
            report[name]


def test_name_of_two_models_is_ambiguous(x):
    models = [nn.Sequential(nn.Linear(4, 4)) for _ in range(2)]
    with profile_flops() as report:
        for model in models:
            model(x)
    with pytest.raises(UnknownNameError, match=r"Sequential\.0, Sequential#2\.0"):
        report["0"]


@pytest.mark.parametrize("report_of", [profile_time, trace])
def test_time_without_a_module_is_noted(report_of):
    with report_of() as report:
        torch.ones(2).relu()
    assert report.notes == ("no module was called in the `with` block: all of it is outside",)


@pytest.mark.parametrize("report_of", [profile_flops, profile_memory])
def test_report_of_an_empty_block_says_so(report_of):
    with report_of() as report:
        pass
    with pytest.raises(StateError, match=r"nothing ran in the `with` block"):
        report.table()
    with pytest.raises(StateError, match="nothing ran"):
        report.to_json()
    assert "nothing ran" in str(report)


def test_page_is_written_to_the_path_and_returned(mlp, x, tmp_path):
    with profile_flops() as report:
        mlp(x).sum().backward()
    path = tmp_path / "report.html"
    page = report.to_html(path)
    assert path.read_text("utf-8") == page
    assert "MLP.a" in page
    assert "recompute: forwards that a checkpoint runs again" in page
    with pytest.raises(StateError, match="a difference has no chart"):
        report.diff(report).to_html()


def test_frames_of_a_page_are_as_wide_as_their_part():
    """Inner modules below outer ones; colours by phase."""
    stacks = {("N", "N.a"): {"forward": 1, "backward": 2}, ("N",): {"forward": 1}}
    page = flame_page("Title", stacks, lambda number: f"{number} u")
    assert 'flex:750000 0 0"><button title="N.a: 3 u' in page
    assert "N.a: 3 u, 75.0% (forward 1 u, backward 2 u, itself 3 u)" in page
    assert "#56b4e9 0.00%,#56b4e9 33.33%,#5fc9a6 33.33%,#5fc9a6 100.00%" in page
    narrow = flame_page("Title", {("N", f"N.{n}"): {"forward": 1} for n in range(3000)}, str)
    assert narrow.count("<button") == 1
