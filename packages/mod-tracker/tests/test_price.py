"""What the tracker and its reports do in Python at every call and operator: that is their price.

Counted, since a clock wavers: the interpreter's instructions in functions of the package, and calls
of these. Bounds are a tenth above what Python 3.11 needs.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

import mod_tracker
from mod_tracker import ModTracker, profile_time

pytestmark = pytest.mark.skipif(
    sys.version_info[:2] != (3, 11), reason="another Python has other instructions"
)
PACKAGE = str(Path(mod_tracker.__file__).parent)
LAYERS, STEPS = 10, 4


def work_of(run):
    """Return the interpreter's instructions in functions of the package, and calls by name."""
    instructions, calls = 0, Counter()

    def within(frame, event, arg):
        nonlocal instructions
        instructions += event == "opcode"
        return within

    def follow(frame, event, arg):
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        calls[frame.f_code.co_name] += 1
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return within

    before = sys.gettrace()
    sys.settrace(follow)
    try:
        run()
    finally:
        sys.settrace(before)
    return instructions, calls


@pytest.fixture
def deep():
    """A step of layers whose inputs and outputs are tensors, and nothing between them."""
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(LAYERS)])
    x = torch.randn(2, 4)
    return lambda: model(x).sum().backward()


def work_under(context, step):
    """The work of steps that are like many before them."""
    with context():
        for _ in range(8):
            step()
        return work_of(lambda: [step() for _ in range(STEPS)])


def test_timing_a_call_takes_thirteen_functions(deep):
    """Six in forward, with two readings and a look at either edge; seven at its edge in backward.

    Three of these read the number of a node, which takes half as long as `operator.methodcaller`.
    """
    alone, calls_alone = work_under(ModTracker, deep)
    timed, calls = work_under(profile_time, deep)
    steps = 20 * STEPS
    assert calls["call"] == STEPS * (LAYERS + 1)
    assert calls["switch"] == 2 * calls["call"] + STEPS * (LAYERS + 1)
    assert sum((calls - calls_alone).values()) <= 13 * LAYERS * STEPS + steps
    assert (timed - alone) / calls["call"] <= 490


def first_step(model):
    """Instructions and functions for each call in the first step of a new tracker."""

    def run():
        with ModTracker():
            model(torch.ones(1))

    instructions, calls = work_of(run)
    return instructions / calls["call"], sum(calls.values()) / calls["call"]


def nested(depth):
    """Containers in each other."""
    model = nn.Identity()
    for _ in range(depth):
        model = nn.Sequential(model)
    return model


def test_first_step_of_a_new_tracker_is_linear():
    """As much for each call, however many modules are beside it or around it."""
    flat = [nn.Sequential(*[nn.Identity() for _ in range(n)]) for n in (100, 10_000)]
    few, many = map(first_step, flat)
    within, deep = map(first_step, (nested(100), nested(200)))
    assert many[0] <= 1.02 * few[0] <= 610
    assert deep[0] <= 1.02 * within[0] <= 650
    assert max(price[1] for price in (few, many, within, deep)) <= 16
