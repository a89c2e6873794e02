"""Whether steps leave more memory behind each time."""

from __future__ import annotations

import pytest
import torch

from mod_tracker import OptionError, assert_no_growth


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


def test_growth_that_stops_is_none():
    """A place must hold more after each of the steps, the last among them."""
    kept = []

    def step():
        if len(kept) < 4:
            kept.append(torch.zeros(10))

    assert_no_growth(step)


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
