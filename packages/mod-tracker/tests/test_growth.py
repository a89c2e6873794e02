"""Whether steps leave more memory behind each time."""

from __future__ import annotations

import pytest
import torch

from mod_tracker import OptionError, assert_no_growth
from mod_tracker._torch_compat import mode_depth


def test_growth_of_a_leak_is_found(model_and_optimizer, train):
    """The place that grows, with bytes per step, and no other."""
    model, optimizer = model_and_optimizer()
    kept = []

    def leaks():
        train(model, optimizer, torch.randn(4, 8))
        kept.append(model(torch.randn(4, 8)).sum())

    with pytest.raises(AssertionError) as error:
        assert_no_growth(leaks)
    text = str(error.value)
    assert text.startswith("mod_tracker.assert_no_growth: ")
    assert "Sequential.0" in text
    assert "test_growth.py:" in text


def test_steps_that_leave_nothing_pass(model_and_optimizer, train):
    """A training step, and one that fills a cache once."""
    model, optimizer = model_and_optimizer()
    cache = {}

    def fills():
        train(model, optimizer, torch.randn(4, 8))
        cache.setdefault("mask", torch.ones(100))

    assert_no_growth(fills)


def test_garbage_is_no_growth():
    """What only a cycle holds is collected."""

    def makes_a_cycle():
        cycle = [torch.zeros(100)]
        cycle.append(cycle)

    assert_no_growth(makes_a_cycle)


def test_growth_that_is_allowed_is_overlooked():
    """So many bytes a step and place; one more is an error that says how many."""
    kept = []

    def leaks():
        kept.append(torch.zeros(1000))
        kept.append([torch.zeros(250), torch.zeros(250)])

    assert_no_growth(leaks, slack_bytes=4000)
    with pytest.raises(AssertionError, match="1 places hold more memory after each of 3") as error:
        assert_no_growth(leaks, slack_bytes=3999)
    assert "4 kB a step  (outside), test_growth.py:" in str(error.value)
    with pytest.raises(AssertionError, match="2 places") as error:
        assert_no_growth(leaks, steps=2, warmup=0)
    lines = str(error.value).splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["4", "2"]


def test_growth_that_stops_is_none():
    """A place must hold more after each of the steps, the last among them."""
    kept = []

    def step():
        if len(kept) < 4:
            kept.append(torch.zeros(10))

    assert_no_growth(step)


def test_growth_in_the_warm_up_is_none():
    """What is made in it is compared with, and not itself; without one it is."""
    kept = []

    def step():
        if len(kept) < 2:
            kept.append(torch.zeros(10))

    assert_no_growth(step, steps=2, warmup=1)
    kept.clear()
    with pytest.raises(AssertionError, match="after each of 2 steps"):
        assert_no_growth(step, steps=2, warmup=0)


def test_steps_are_run_as_often_as_is_said():
    """Those to warm up first."""
    ran = []
    assert_no_growth(lambda: ran.append(None), steps=4, warmup=3)
    assert len(ran) == 7


def test_error_in_a_step_goes_through():
    """At once, and nothing is watched after it."""
    ran = []

    def fails():
        ran.append(None)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        assert_no_growth(fails)
    assert len(ran) == 1
    assert mode_depth() == 0


@pytest.mark.parametrize(("steps", "warmup", "slack_bytes"), [(0, 2, 0), (3, -1, 0), (3, 2, -1)])
def test_numbers_are_checked_before_a_step_is_run(steps, warmup, slack_bytes):
    """With all three of them, and what to do."""
    ran = []
    says = f"steps {steps}, warmup {warmup} or slack_bytes {slack_bytes} is too small"
    with pytest.raises(OptionError, match=says) as e:
        assert_no_growth(
            lambda: ran.append(None), steps=steps, warmup=warmup, slack_bytes=slack_bytes
        )
    assert str(e.value).endswith("Leave them out for the defaults.")
    assert ran == []


def test_growth_that_begins_after_the_warm_up_is_found():
    """Steps to warm up need not grow."""
    ran, kept = [], []

    def step():
        ran.append(None)
        if len(ran) > 3:
            kept.append(torch.zeros(10))

    with pytest.raises(AssertionError, match="1 places"):
        assert_no_growth(step, steps=2, warmup=3)
