"""A failed trial is reported, whatever way it ends."""

from __future__ import annotations

import math
import os
import signal
import time

import pytest
from stress import results
from stress.trials import Asked, Scenario, command, run_scenario


def run(trial, *, count=4, **options):
    """Return the result of a scenario with that trial."""
    scenario = Scenario("forks", "made-up", lambda job: (count, trial), **options)
    return run_scenario(scenario, Asked(), math.inf)


def kill(number):
    if number == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return ""


def fail(number):
    if number == 2:
        raise ValueError("on purpose")
    return ""


def hang(number):
    if number == 2:
        time.sleep(60)
    return ""


@pytest.mark.parametrize(
    ("trial", "why", "options"),
    [
        (lambda number: "wrong" if number == 2 else "", "wrong", {}),
        (fail, "ValueError: on purpose", {}),
        (kill, "the process of rank 0 ended SIGKILL", {}),
        (hang, "no end after", {"patience_s": 1.0}),
    ],
)
def test_failed_trial_is_counted_once(trial, why, options):
    """The result has its number and a command, and the other trials still run."""
    found = run(trial, **options)
    assert (found.tried, found.passed, len(found.failures)) == (4, 3, 1)
    assert found.failures[0].number == 2
    assert why in found.failures[0].why
    assert found.failures[0].command == (
        "python -m stress --only forks --scenario made-up --seed 0 --number 2"
    )


def test_error_in_preparation_is_a_failure():
    """A scenario that cannot be prepared has not passed."""

    def prepare(job):
        raise ValueError("on purpose")

    found = run_scenario(Scenario("forks", "made-up", prepare), Asked(), math.inf)
    assert (found.passed, len(found.failures)) == (0, 1)
    assert "outside of a trial" in found.failures[0].why
    assert "ValueError: on purpose" in found.failures[0].why


def test_failure_on_one_rank_is_counted_once():
    """Both ranks start again after it."""

    def prepare(job):
        return 4, lambda number: "wrong" if number == 1 and job.rank == 1 else ""

    found = run_scenario(Scenario("forks", "made-up", prepare, ranks=2), Asked(), math.inf)
    assert (found.tried, found.passed, len(found.failures)) == (4, 3, 1)


def test_a_trial_that_came_to_nothing_is_not_tried():
    """It counts as skipped."""
    found = run(lambda number: None if number == 3 else "")
    assert (found.tried, found.skipped, found.failures) == (3, 1, [])


def test_numbers_are_the_same_each_time_and_one_can_be_asked_for():
    """A fixed seed shuffles all of them; `every` and `count` select a part."""
    scenario = Scenario("forks", "made-up", lambda job: (0, kill), first=1)
    order = Asked(seed=1).numbers(scenario, 10)
    assert sorted(order) == list(range(1, 11))
    assert order == Asked(seed=1).numbers(scenario, 10) != Asked(seed=2).numbers(scenario, 10)
    assert Asked(seed=1, every=3).numbers(scenario, 10) == order[::3]
    assert Asked(seed=1, count=2).numbers(scenario, 10) == order[:2]
    assert Asked(number=7).numbers(scenario, 10) == [7]
    assert "--seed 1 --number 7" in command(scenario, Asked(seed=1), 7)


def test_what_differs_in_kind_comes_first():
    """A run that is cut short has tried one of each kind, and reports their number."""
    early = frozenset({3, 17, 31})

    def prepare(job):
        job.early = early
        return 40, lambda number: "" if number in early else "too early"

    scenario = Scenario("forks", "made-up", prepare)
    assert sorted(Asked().numbers(scenario, 40, early)) == list(range(40))
    found = run_scenario(scenario, Asked(count=3), math.inf)
    assert (found.tried, found.early, found.failures) == (3, 3, [])
    cut = results.Result("interrupts", "x", tried=2, total=40, early=3)
    assert results.rows([cut])[0][-1] == "of 40, 2 of 3 instructions"


def test_time_that_is_over_ends_a_scenario():
    """Trials that did not run do not count."""
    scenario = Scenario("forks", "made-up", lambda job: (4, kill))
    found = run_scenario(scenario, Asked(), time.monotonic() - 1)
    assert (found.tried, found.total, found.failures) == (0, 4, [])


def test_table_holds_every_figure():
    """Tried, passed, failed and seconds of each scenario, their sums, and each failure."""
    failure = results.Failure(3, "number 3: wrong", "python -m stress")
    found = [
        results.Result("soak", "flat", 3, 0, 3, 10.2, [], {"memory": "+0.10 %"}),
        results.Result("saves", "killed", 5, 1, 9, 5.0, [failure]),
    ]
    assert results.rows(found) == [
        ("soak flat", "3", "3", "0", "10", "memory +0.10 %"),
        ("saves killed", "5", "4", "1", "5", "of 9, 1 skipped"),
        ("all", "8", "7", "1", "15", ""),
    ]
    told = results.table(found).splitlines()
    assert told[0].split() == ["scenario", "tried", "passed", "failed", "seconds"]
    assert told[-2:] == ["failed: saves killed: number 3: wrong", "  python -m stress"]
