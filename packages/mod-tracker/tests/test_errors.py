"""Every error this package raises, by its text; nothing changes when it is raised."""

from __future__ import annotations

import inspect
import sys

import pytest
import torch
from torch import nn

import mod_tracker
from mod_tracker import (
    MissingExtraError,
    ModTrackerError,
    OptionError,
    ReportSchedule,
    StateError,
    lightning_callback,
    profile_flops,
    profile_time,
    transformers_callback,
    watch_memory,
)


def test_every_error_has_the_base_class_and_a_builtin_one():
    """Leaves are also ValueError, RuntimeError or KeyError."""
    found = [
        e for e in vars(mod_tracker).values() if inspect.isclass(e) and issubclass(e, Exception)
    ]
    for error in found:
        assert issubclass(error, ModTrackerError)
        assert error is ModTrackerError or issubclass(error, (ValueError, RuntimeError, KeyError))


def test_unknown_clock():
    """A clock is the host's or a device's."""
    with pytest.raises(OptionError, match=r"clock 'sun' cannot be read"), profile_time(clock="sun"):
        pass


@pytest.mark.parametrize(
    ("formulas", "says"),
    [
        (
            {torch.mm: len},
            r"not an operator, and only operators are seen\. Use torch\.ops\.aten\.mm\.",
        ),
        ({"mm": len}, r"'mm' of `formulas` is not an operator.*Use torch\.ops\.LIBRARY\.NAME\."),
        ({torch.ops.aten.mm: 3}, r"formula of aten\.mm is 3, but it must be a function of shapes"),
    ],
)
def test_formulas_that_would_count_nothing(formulas, says):
    """Refused before anything is measured."""
    with pytest.raises(OptionError, match=says), profile_flops(formulas=formulas):
        pass


def test_report_read_too_early():
    """A report is complete when its block ends."""
    with (
        profile_flops() as report,
        pytest.raises(StateError, match=r"the report is empty, but it is read"),
    ):
        report.table()


def test_unknown_column():
    """The columns there are, are named."""
    with profile_flops() as report:
        nn.Linear(2, 2)(torch.ones(1, 2))
    with pytest.raises(OptionError, match=r"column 'colour' is unknown"):
        report.top(1, by="colour")


def test_difference_of_unlike_reports():
    """FLOPs less nanoseconds is nothing."""
    with profile_flops() as flops, profile_time() as times:
        nn.Linear(2, 2)(torch.ones(1, 2))
    with pytest.raises(OptionError, match=r"the other report is a TimeReport"):
        flops.diff(times)


@pytest.mark.parametrize("limit", [-1, 2.0, "10", True])
def test_limit_that_is_no_number_of_modules(limit):
    """None is for all."""
    with profile_flops() as report:
        nn.Linear(2, 2)(torch.ones(1, 2))
    with pytest.raises(OptionError) as caught:
        report.scalars(limit=limit)
    assert str(caught.value) == (
        f"mod_tracker.scalars: limit {limit!r} is not a number of modules, but it must be an int "
        "of at least 0, or None. Leave it out for 20."
    )


@pytest.mark.parametrize("count", [0, -1, 2.0, "10", None, True])
def test_every_n_steps_that_is_no_number_of_steps(count):
    """One step of at least one is measured."""
    with pytest.raises(OptionError) as caught:
        ReportSchedule(profile_time, every_n_steps=count, on_report=print)
    assert str(caught.value) == (
        f"mod_tracker.ReportSchedule: every_n_steps {count!r} is not a number of steps, but it "
        "must be an int of at least 1. Give 100 for example."
    )


@pytest.mark.parametrize("count", [-1, 2.0, None, False])
def test_skip_first_that_is_no_number_of_steps(count):
    """None may be left out."""
    with pytest.raises(OptionError, match=r"skip_first .* is not a number of steps, .* least 0"):
        ReportSchedule(profile_time, every_n_steps=1, on_report=print, skip_first=count)


GIVE = (
    "Give profile_flops, profile_time, profile_memory or trace, or a function that calls one: "
    "functools.partial(profile_memory, model)."
)


@pytest.mark.parametrize("report", [profile_time(), None, "time"])
def test_report_that_cannot_be_called_in_each_step(report):
    """A context that was made already, above all, although it can be called as a decorator."""
    with pytest.raises(OptionError) as caught:
        ReportSchedule(report, every_n_steps=1, on_report=print)
    assert str(caught.value) == (
        f"mod_tracker.ReportSchedule: report is a {type(report).__name__}, but it is called again "
        f"in each step that is measured. {GIVE}"
    )


@pytest.mark.parametrize(
    ("report", "name"),
    [(lambda: None, "NoneType"), (torch.no_grad, "NoneType"), (watch_memory, "MemoryWatch")],
)
def test_report_that_is_not_one_of_ours(report, name):
    """It is known in the first step measured, where nothing is left of it."""
    original, reported = nn.Module.__call__, []
    schedule = ReportSchedule(report, every_n_steps=1, on_report=lambda *_: reported.append(1))
    with pytest.raises(OptionError) as caught:
        schedule.begin_step()
    assert str(caught.value) == (
        f"mod_tracker.ReportSchedule: the report is a {name}, but it must be a Report. {GIVE} "
        "watch_memory is made to be left on around the loop."
    )
    schedule.end_step()
    assert (nn.Module.__call__, reported) == (original, [])
    assert torch.is_grad_enabled()


def test_on_report_that_cannot_be_called():
    """It is called with a report and a step."""
    with pytest.raises(OptionError) as caught:
        ReportSchedule(profile_time, every_n_steps=1, on_report="report.json")
    assert str(caught.value) == (
        "mod_tracker.ReportSchedule: on_report is a str, but it is called with each report and "
        "its step. Give a function of these two."
    )


FACTORIES = {"transformers": transformers_callback, "lightning": lightning_callback}
BASES = {"transformers": "TrainerCallback", "lightning": "Callback"}


@pytest.mark.parametrize("library", list(FACTORIES))
def test_library_of_a_callback_that_is_missing(library, monkeypatch):
    """The error says what to install."""
    for name in (library, f"{library}.pytorch", f"pytorch_{library}"):
        monkeypatch.setitem(sys.modules, name, None)
    schedule = ReportSchedule(profile_time, every_n_steps=1, on_report=print)
    with pytest.raises(MissingExtraError) as caught:
        FACTORIES[library](schedule)
    assert str(caught.value) == (
        f"mod_tracker.{library}_callback: {library} is not installed, but its {BASES[library]} is "
        f"the class of this callback. Install it: python -m pip install {library}."
    )


@pytest.mark.parametrize("library", list(FACTORIES))
@pytest.mark.parametrize("given", [profile_flops, 100])
def test_callback_of_something_else_than_a_schedule(library, given):
    """The error shows how one is made."""
    with pytest.raises(OptionError) as caught:
        FACTORIES[library](given)
    assert str(caught.value) == (
        f"mod_tracker.{library}_callback: a {type(given).__name__} is given, but it must be a "
        "ReportSchedule. Give ReportSchedule(profile_time, every_n_steps=100, on_report=...)."
    )
