"""Invalid input: each error says what was passed and what is accepted, before anything changes."""

from __future__ import annotations

import inspect
import sys
from functools import partial

import pytest
import torch
from torch import nn

import mod_tracker
from mod_tracker import (
    MissingExtraError,
    ModTracker,
    ModTrackerError,
    OptionError,
    ReportSchedule,
    StateError,
    UnknownNameError,
    assert_no_growth,
    lightning_callback,
    profile_flops,
    profile_memory,
    profile_time,
    trace,
    transformers_callback,
    watch_memory,
)


def test_every_error_has_the_base_class_and_a_builtin_one():
    """Concrete errors are also a ValueError, RuntimeError, KeyError or similar."""
    found = [
        e for e in vars(mod_tracker).values() if inspect.isclass(e) and issubclass(e, Exception)
    ]
    for error in found:
        assert issubclass(error, ModTrackerError)
        assert error is ModTrackerError or issubclass(error, (ValueError, RuntimeError, KeyError))


def enter(context):
    """Enter and leave a report."""
    with context:
        pass


def enter_and(context, method, **options):
    """Call a method in the block of a report."""
    with context as found:
        getattr(found, method)(**options)


def measured(function=profile_flops):
    """A report of one call of a layer."""
    with function() as report:
        nn.Linear(2, 2)(torch.ones(1, 2))
    return report


schedule = partial(ReportSchedule, profile_time, on_report=print)
NOT_FLOPS = {torch.ops.aten.mm: 3}

WRONG = {
    "must be an int of at least 1; got 0": lambda: ModTracker(history=0),
    "history must be an int of at least 1; got 'all'": lambda: ModTracker(history="all"),
    "got AdamW. Pass the model first, and options by keyword": lambda: enter(
        profile_memory(nn.ReLU(), torch.optim.AdamW(nn.Linear(2, 2).parameters()))
    ),
    "got Tensor": lambda: enter(profile_flops(torch.ones(1))),
    "pre_fw_hook must be a function; got 'log'": lambda: ModTracker().register_user_hooks("log"),
    "in_module: patterns must be strings": lambda: ModTracker().in_module(nn.Linear),
    "on: no memory is on cuda:9": lambda: enter_and(watch_memory(), "page", device="cuda:9"),
    "clock must be 'cpu'": lambda: enter(profile_time(clock="sun")),
    "ranges must be None, 'record_function'": lambda: enter(trace(ranges=True)),
    "formulas must be a dict": lambda: enter(profile_flops(formulas=[torch.ops.aten.mm])),
    "Use torch.ops.aten.mm.": lambda: enter(profile_flops(formulas={torch.mm: len})),
    "Use torch.ops.aten.addmm.": lambda: enter(profile_flops(formulas={"aten.addmm": len})),
    "Use torch.ops.LIBRARY.NAME.": lambda: enter(profile_flops(formulas={"my_operator": len})),
    "formula of aten.mm must be a function": lambda: enter(profile_flops(formulas=NOT_FLOPS)),
    "optimizer must be a torch optimizer": lambda: enter(profile_memory(optimizer=nn.ReLU())),
    "optimizer must be a torch optimizer with a state; got type": lambda: enter(
        watch_memory(optimizer=torch.optim.Adam)
    ),
    "limit_bytes must be an int of at least 1, or None": lambda: enter(watch_memory(limit_bytes=0)),
    "limit_bytes must be an int of at least 1": lambda: enter(watch_memory(limit_bytes=1e9)),
    "step must be a function that runs one step; got None": lambda: assert_no_growth(None),
    "steps must be an int of at least 2; got 1": lambda: assert_no_growth(print, steps=1),
    "warmup must be an int of at least 0": lambda: assert_no_growth(print, warmup=-1),
    "slack_bytes must be an int of at least 0": lambda: assert_no_growth(print, slack_bytes=-1),
    "top: by must be a column; got 'colour'. Choose one of: calls": lambda: measured().top(
        1, by="colour"
    ),
    "by must be a column; got 'forwards'. Similar columns: forward": lambda: measured().table(
        by="forwards"
    ),
    "scalars: by must be a column; got 3": lambda: measured().scalars(by=3),
    "table: by must be a column; got ''": lambda: measured().table(by=""),
    "sum: column must be a column; got 'name'": lambda: measured().sum("name"),
    "sum: column must be a column; got ['forward']": lambda: measured().sum(["forward"]),
    "sum: patterns must be strings such as 'layers.*'": lambda: measured().sum("forward", 0),
    "on: no memory is on cuda:7": lambda: measured(profile_memory).on("cuda:7"),
    "no peak is known for the device 'H1000'": lambda: measured().mfu("H1000", 1.0),
    "limit_bytes['cpu'] must be an int of at least 1; got 0": lambda: enter(
        watch_memory(limit_bytes={"cpu": 0})
    ),
    "a key of limit_bytes must be a device": lambda: enter(watch_memory(limit_bytes={"gpu": 1})),
    "count must be an int of at least 0; got 'total'": lambda: measured().top("total"),
    "limit must be an int of at least 0, or None": lambda: measured().table(limit=-1),
    "limit must be an int": lambda: measured().scalars(limit=True),
    "by must be a column whose amounts add up; got 'forward'": lambda: measured().to_html(
        by="forward"
    ),
    "both reports must be of the same kind; got FlopReport and TimeReport": lambda: measured().diff(
        measured(profile_time)
    ),
    "peak_flops must be a number above zero; got None": lambda: measured().mfu(None, 1.0),
    "seconds must be a number above zero; got 0": lambda: measured().hfu(1e12, 0),
    "every_n_steps must be an int of at least 1; got 0": lambda: schedule(every_n_steps=0),
    "every_n_steps must be an int of at least 1; got True": lambda: schedule(every_n_steps=True),
    "skip_first must be an int of at least 0": lambda: schedule(every_n_steps=1, skip_first=None),
    "report must be a function": lambda: ReportSchedule(
        profile_time(), every_n_steps=1, on_report=print
    ),
    "on_report must be a function of a report and its step": lambda: ReportSchedule(
        profile_time, every_n_steps=1, on_report="report.json"
    ),
    "pass a ReportSchedule; got function": lambda: transformers_callback(profile_flops),
    "pass a ReportSchedule; got int": lambda: lightning_callback(100),
}


@pytest.mark.parametrize("says", WRONG)
def test_wrong_option_is_refused(says):
    """The message names the option and shows the value; no hook or mode is left behind."""
    original = nn.Module.__call__
    with pytest.raises(OptionError) as caught:
        WRONG[says]()
    assert says in str(caught.value)
    assert nn.Module.__call__ is original


def test_report_read_too_early():
    """A report is complete when its block ends; reading it earlier raises an error."""
    for function in (profile_flops, profile_memory, profile_time, trace):
        with function() as report:
            nn.Linear(2, 2)(torch.ones(1, 2))
            for read in (report.table, report.to_json, lambda report=report: report.total):
                with pytest.raises(StateError, match=r"Read it after the block\."):
                    read()
            assert "Read it after the block" in str(report)


@pytest.mark.parametrize("of", [profile_flops, profile_memory, profile_time, trace, watch_memory])
def test_report_read_without_its_block(of):
    said = f"use it as `with {of.__name__}(...) as report:`, and read table from the report"
    with pytest.raises(StateError) as error:
        of().table()
    assert str(error.value) == f"mod_tracker.{of.__name__}: {said}."
    assert not hasattr(of(), "table")


@pytest.mark.parametrize("name", ["Liner", "", 0])
def test_row_of_a_module_that_did_not_run(name):
    """The message lists similar names, if there are any."""
    with pytest.raises(UnknownNameError) as caught:
        measured()[name]
    close = "Similar names: Linear." if name == "Liner" else "Print the report to see all."
    assert str(caught.value) == f"mod_tracker.report: no module named {name!r} ran. {close}"


@pytest.mark.parametrize(
    ("report", "name"),
    [(lambda: None, "NoneType"), (torch.no_grad, "NoneType"), (watch_memory, "MemoryWatch")],
)
def test_report_that_is_not_one_of_ours(report, name):
    original, reported = nn.Module.__call__, []
    schedule = ReportSchedule(report, every_n_steps=1, on_report=lambda *_: reported.append(1))
    with pytest.raises(OptionError, match=f"report must make a Report; it made {name}"):
        schedule.begin_step()
    schedule.end_step()
    assert (nn.Module.__call__, reported) == (original, [])
    assert torch.is_grad_enabled()


FACTORIES = {"transformers": transformers_callback, "lightning": lightning_callback}


@pytest.mark.parametrize("library", list(FACTORIES))
def test_library_of_a_callback_that_is_missing(library, monkeypatch):
    """The error gives the install command."""
    for name in (library, f"{library}.pytorch", f"pytorch_{library}"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=f"python -m pip install {library}"):
        FACTORIES[library](schedule(every_n_steps=1))
