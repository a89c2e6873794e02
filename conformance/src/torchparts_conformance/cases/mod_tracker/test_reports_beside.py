"""Reports beside other work: threads, other reports, and devices with clocks of their own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from torchparts_conformance import requirement
from torchparts_conformance.cases._devices import devices, lag, module_of, synchronize


def _layers(where, width):
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(10)]).to(where)


@requirement(
    "MT-431",
    level="MUST",
    text=(
        'With `clock="device"` the time of a module MUST be what its device takes for it, by '
        "the clock of that device whichever is current, however far the host is ahead; where "
        "there is no such device it MUST be an error."
    ),
    rationale=(
        "the host's clock tells how long it takes to ask for work; reproduced on two devices: "
        "the current one's time was told of both"
    ),
    since="0.1.0",
    profile="reports",
    group="time",
)
def test_time_of_a_module_is_its_devices(part, device):
    """Of the second device too, which is not the current one; events around the calls tell it."""
    with pytest.raises(ValueError, match="abacus"), part.profile_time(clock="abacus"):
        pass
    if device == "cpu":
        return
    width = 64 if hasattr(module_of(device), "simulate") else 2048
    places = devices(device)
    models = nn.ModuleList(_layers(where, width) for where in places)
    inputs = [torch.ones(width, width, device=where) for where in places]
    for model, x in zip(models, inputs, strict=True):
        model(x)
    synchronize(device)
    lag(device)
    events = []
    with part.profile_time(models, clock="device") as report:
        for where, model, x in zip(places, models, inputs, strict=True):
            stream = torch.accelerator.current_stream(where)
            begin, end = (torch.Event(where, enable_timing=True) for _ in "ab")
            begin.record(stream)
            model(x)
            end.record(stream)
            events.append((begin, end))
    for number, (begin, end) in enumerate(events):
        around_ns = begin.elapsed_time(end) * 1e6
        assert 0.5 * around_ns <= report[f"ModuleList.{number}"].forward <= 1.01 * around_ns
