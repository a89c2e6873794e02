"""Schedules: measured steps, the steps between them, and steps that fail."""

from __future__ import annotations

import os
import sys
import threading
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.modules import module as hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode, is_in_torch_dispatch_mode

import mod_tracker
from mod_tracker import ReportSchedule, profile_flops, profile_memory, profile_time, trace

REPORTS = [profile_flops, profile_memory, profile_time, trace]
SOURCE = os.path.dirname(mod_tracker.__file__)


def present():
    """Everything that a report may install in the process."""
    table = (hooks._global_forward_hooks, hooks._global_forward_pre_hooks)
    modes = (
        _get_current_dispatch_mode(),
        is_in_torch_dispatch_mode(),
        torch._C._autograd._top_saved_tensors_default_hooks(True),
    )
    return (nn.Module.__call__, *map(len, table), *modes)


def in_a_block(schedule, work, number=None):
    """A step with `with schedule.step()`."""
    with schedule.step(number):
        work()


def by_begin_and_end(schedule, work, number=None):
    """A step with `begin_step` and `end_step`, with the schedule around the loop."""
    with schedule:
        schedule.begin_step(number)
        work()
        schedule.end_step()


WAYS = [in_a_block, by_begin_and_end]


@pytest.fixture
def step(mlp):
    """A training step."""
    return lambda: mlp(torch.ones(2, 4)).sum().backward()


@pytest.fixture
def found():
    """Steps and reports that `on_report` got."""
    return []


@pytest.fixture
def every(found):
    """`every(n, report, **options)` makes a schedule that adds to `found`."""

    def make(count, report=profile_flops, **options):
        note = lambda report, number: found.append((number, report))  # noqa: E731
        return ReportSchedule(report, every_n_steps=count, on_report=note, **options)

    return make


@pytest.mark.parametrize("run", WAYS)
def test_one_step_of_every_n_is_measured(run, step, every, found):
    """The first step after the skipped ones, and each n-th from there, each with its own report."""
    schedule = every(3, skip_first=2)
    for _ in range(9):
        run(schedule, step)
    assert [number for number, _ in found] == [2, 5, 8]
    # 2 layers of 4 x 4, 2 rows, forward once and backward twice, without the input's gradient
    assert {report.total for _, report in found} == {2 * 2 * 16 * 2 + 3 * 2 * 2 * 16}


@pytest.mark.parametrize("run", WAYS)
def test_step_numbers_do_not_change_the_schedule(run, step, every, found):
    """A loop may count by two, or resume from a checkpoint."""
    schedule = every(2)
    for number in (7, 9, 11, 13):
        run(schedule, step, number)
    assert [number for number, _ in found] == [7, 11]


@pytest.mark.parametrize("run", WAYS)
@pytest.mark.parametrize("report", REPORTS)
def test_nothing_is_installed_between_measured_steps(run, report, step, every, found):
    """No mode, hook or patch: no function of this package runs inside such a step."""
    made, seen, frames = [], [], []

    def counted():
        made.append(report)
        return report()

    def watched():
        seen.append(present() == before)
        ran = 0

        def profile(frame, event, arg):
            nonlocal ran
            ran += event == "call" and frame.f_code.co_filename.startswith(SOURCE)

        sys.setprofile(profile)
        try:
            step()
        finally:
            sys.setprofile(None)
        frames.append(ran)

    before, schedule = present(), every(3, counted)
    for _ in range(6):
        run(schedule, watched)
    assert len(made) == len(found) == 2
    assert seen == [False, True, True] * 2
    assert [count > 0 for count in frames] == [True, False, False] * 2
    assert present() == before


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("run", WAYS)
@pytest.mark.parametrize("report", REPORTS)
def test_failed_step_is_cleaned_up(report, run, error, step, every, found):

    def fails():
        step()
        raise error("in a step")

    before, schedule = present(), every(2, report)
    with pytest.raises(error, match="in a step"):
        run(schedule, fails)
    assert present() == before
    run(schedule, step)
    run(schedule, step)
    assert [number for number, _ in found] == [2]
    assert found[0][1].total > 0


@pytest.mark.parametrize("run", WAYS)
def test_error_of_the_users_function_reaches_the_loop(run, step):

    def breaks(report, number):
        assert present() == before
        raise ValueError("no disk")

    before = present()
    with pytest.raises(ValueError, match="no disk"):
        run(ReportSchedule(profile_memory, every_n_steps=1, on_report=breaks), step)
    assert present() == before


def test_step_without_an_end_is_abandoned_by_the_next(step, every, found):
    before, schedule = present(), every(2)
    schedule.end_step()
    schedule.begin_step()
    assert present() != before
    schedule.begin_step()
    assert present() == before
    schedule.end_step()
    schedule.close()
    assert found == []


@pytest.mark.parametrize("inner", REPORTS)
@pytest.mark.parametrize("outer", REPORTS)
def test_schedules_may_end_in_the_order_in_which_they_began(outer, inner, step, every, found):
    before, pair = present(), [every(1, outer), every(1, inner)]
    for schedule in pair:
        schedule.begin_step()
    step()
    for schedule in pair:
        schedule.end_step()
    assert [report.total > 0 for _, report in found] == [True, True]
    assert present() == before


def test_steps_of_threads_are_independent(every, found):
    """Ending a step in one thread does not end a step of another."""
    here, there = every(1, profile_time), every(1, profile_time)
    here.begin_step(1)
    thread = threading.Thread(target=there.begin_step, args=(2,))
    thread.start()
    thread.join()
    here.end_step()
    assert [number for number, _ in found] == [1]
    there.end_step()
    assert [number for number, _ in found] == [1, 2]


def test_options_of_a_report_are_given_by_a_function(mlp, step, every, found):
    for report in (partial(profile_memory, mlp), lambda: profile_memory(mlp)):
        in_a_block(every(1, report), step)
    assert [report["MLP"].parameters for _, report in found] == [2 * 4 * 16] * 2
