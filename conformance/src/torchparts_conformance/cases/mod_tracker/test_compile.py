"""A tracker with torch.compile."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from torchparts_conformance import requirement
from torchparts_conformance.cases.mod_tracker._models import MLP, events_of, leaf, linear, step


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@requirement(
    "MT-401",
    "Entering and leaving a tracker SHOULD NOT recompile a compiled model.",
    rationale="pytorch#152740",
    profile="compile",
)
def test_no_recompilation(part, device):
    """One graph before, inside and after the block."""
    graphs, x = [], leaf(device)

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    run = torch.compile(MLP(device), backend=backend, fullgraph=True)
    run(x)
    with part.ModTracker():
        run(x)
    run(x)
    assert len(graphs) == 1


class Outer(nn.Module):
    """A part to compile and a part that is not compiled."""

    def __init__(self, device):
        super().__init__()
        self.m, self.o = MLP(device), linear(device)

    def forward(self, x):
        """Run both parts."""
        return self.o(self.m(x))


@requirement(
    "MT-402",
    "A compiled part SHOULD be one module under the user's name, however it was compiled.",
    rationale="reproduced on torch 2.13; pytorch#124196",
    profile="compile",
)
@pytest.mark.parametrize("in_place", [False, True])
def test_compiled_part(part, device, in_place):
    """One module without children, under its own name."""
    model = Outer(device)
    if in_place:
        model.m.compile(backend="aot_eager")
    else:
        model.m = torch.compile(model.m, backend="aot_eager")
    tracker = part.ModTracker()
    events = events_of(tracker)
    with tracker:
        step(model, leaf(device))
    names = {event[4:] for event in events}
    assert names == {"Outer", "Outer.m", "Outer.o"}
    assert [e for e in events if e.endswith(".m")] == [
        *("+fw Outer.m", "-fw Outer.m", "+bw Outer.m", "-bw Outer.m")
    ]
