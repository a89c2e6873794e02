"""`assert_no_growth` on leaking and clean steps."""

from __future__ import annotations

import pytest
import torch

from mod_tracker import assert_no_growth


def test_growth_of_a_leak_is_found(model_and_optimizer, train):
    """The message names the growing line, with bytes per step, and no other."""
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
    """A training step, and a step that fills a cache once."""
    model, optimizer = model_and_optimizer()
    cache = {}

    def fills():
        train(model, optimizer, torch.randn(4, 8))
        cache.setdefault("mask", torch.ones(100))

    assert_no_growth(fills)


def test_garbage_is_no_growth():

    def makes_a_cycle():
        cycle = [torch.zeros(100)]
        cycle.append(cycle)

    assert_no_growth(makes_a_cycle)


def test_leaks_that_take_turns_are_found():
    """No line grows in each step, but the total does."""
    even, odd = [], []

    def step():
        if len(even) > len(odd):
            odd.append(torch.zeros(10))
        else:
            even.append(torch.zeros(10))

    with pytest.raises(AssertionError, match="memory grew in each of 4 steps") as error:
        assert_no_growth(step, steps=4)
    assert str(error.value).count("test_growth.py:") == 2
    assert_no_growth(step, steps=4, slack_bytes=40)


def test_memory_that_moves_between_lines_is_no_leak():
    held = [torch.zeros(10)]

    def step():
        held[0] = torch.zeros(10) if len(held) % 2 else torch.ones(10)

    assert_no_growth(step)


def test_growth_that_stops_is_no_leak():
    """A leak must grow in every step, including the last."""
    kept = []

    def step():
        if len(kept) < 4:
            kept.append(torch.zeros(10))

    assert_no_growth(step)
