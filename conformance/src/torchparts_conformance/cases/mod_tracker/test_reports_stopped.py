"""Reports of a loop that catches what stopped a backward, and goes on."""

from __future__ import annotations

import json
import time

import pytest
import torch
from torch import nn

from torchparts_conformance import requirement
from torchparts_conformance.cases.mod_tracker._models import leaf, linear

REST_S = 0.25
LARGE = 1 << 20


class _Stop(Exception):
    """Raised in the middle of a backward."""


def _stopped(device, again):
    """Stop a backward between two modules; `again`: run it once more, to its end."""
    first, second, stops = linear(device), nn.Tanh(), [True]

    def hook(grad):
        if stops:
            raise _Stop

    hidden = first(leaf(device))
    hidden.register_hook(hook)
    loss = second(hidden).sum()
    with pytest.raises(_Stop):
        loss.backward(retain_graph=True)
    if again:
        stops.clear()
        loss.backward()


@requirement(
    "MT-434",
    level="MUST",
    text=(
        "Time that passes after a backward which failed, or after a second backward of the same"
        " graph, MUST be outside of modules until the next forward."
    ),
    rationale=(
        "a loop that catches an error in backward, and loads another batch: the time was "
        "charged to the module whose backward had run last"
    ),
    since="0.1.0",
    profile="reports",
    group="time",
)
@pytest.mark.parametrize("again", [False, True])
def test_time_after_a_backward_that_was_stopped(part, device, again):
    """A quarter of a second in which nothing runs is outside."""
    _stopped(device, again)  # first uses are not the subject
    with part.profile_time() as report:
        _stopped(device, again)
        time.sleep(REST_S)
    assert {"Linear", "Tanh"} <= set(report.rows)
    assert report.outside.self_total > 0.9e9 * REST_S


@requirement(
    "MT-435",
    level="MUST",
    text=(
        "The slices of a backward that failed, and those of a second backward of the same "
        "graph, MUST end with it: memory that is taken afterwards lies in no slice."
    ),
    rationale=(
        "the slice of the module whose backward had run last went on until the next forward, "
        "with all the memory that a loop took after it had caught the error"
    ),
    since="0.1.0",
    profile="reports",
    group="trace",
)
@pytest.mark.parametrize("again", [False, True])
def test_trace_after_a_backward_that_was_stopped(part, device, again):
    """A megabyte is taken while no slice is open."""
    with part.trace(memory=True) as report:
        _stopped(device, again)
        made = torch.ones(LARGE, dtype=torch.uint8, device=device)
    opened, slices, beside = [], 0, []
    for event in json.loads(report.to_json())["traceEvents"]:
        if event["ph"] == "B":
            opened.append(event["name"])
            slices += event["cat"] == "backward"
        elif event["ph"] == "E":
            opened.pop()
        elif event["ph"] == "C" and max(event["args"].values()) >= made.nbytes:
            beside.append(list(opened))
    assert slices
    assert beside
    assert not any(beside)
