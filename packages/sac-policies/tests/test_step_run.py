"""What is written down of a step hangs together."""

from __future__ import annotations

import torch
from torch import nn

from sac_policies import profile_step
from sac_policies.budget.predicting._step_run import StepRun


def run() -> StepRun:
    """Two layers, of which one writes in place."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Linear(16, 4), nn.Tanh())
    return profile_step(model, torch.randn(32, 8))._run


def test_values_are_those_that_calls_made_or_wrote() -> None:
    """Each knows its call; what was written to lies in the storage of another."""
    found = run()
    made = {number: at for at, call in enumerate(found.calls) for number in call.made}
    for number, value in enumerate(found.values):
        assert value.call == made.get(number, value.call)
        assert value.storage == number or number not in made
    assert len(made) < len(found.values)


def test_nothing_is_read_or_freed_before_it_was_made() -> None:
    """Saved tensors are read before they are released, and each once."""
    found, made, read = run(), set(), []
    for kind, number in found.events:
        if kind == "call":
            assert all(found.values[each].storage in made for each, _ in found.calls[number].read)
            made |= {*found.calls[number].made}
        elif kind == "free":
            made.remove(number)
        elif kind == "read":
            read.append(number)
        else:
            assert number in read
    assert sorted(read) == list(range(len(found.saved)))
