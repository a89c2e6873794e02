"""torch.compile with a tracker."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch._dynamo import compiled_autograd

from mod_tracker import ModTracker, profile_flops, profile_memory

pytestmark = pytest.mark.usefixtures("fresh_compiler")

BACKENDS = ("eager", "aot_eager")


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x):
        return self.a(x).relu()


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.m = Inner()
        self.l = nn.Linear(4, 4)

    def forward(self, x):
        return self.l(self.m(x))


def compile_root(model, backend):
    """`torch.compile(model)`."""
    return torch.compile(model, backend=backend, fullgraph=True)


def compile_root_in_place(model, backend):
    """`model.compile()`."""
    model.compile(backend=backend, fullgraph=True)
    return model


def compile_part(model, backend):
    """`model.m = torch.compile(model.m)`."""
    model.m = torch.compile(model.m, backend=backend, fullgraph=True)
    return model


def compile_part_in_place(model, backend):
    """`model.m.compile()`."""
    model.m.compile(backend=backend, fullgraph=True)
    return model


def compile_function(model, backend):
    """A compiled function that calls the model."""
    return torch.compile(lambda x: model(x), backend=backend, fullgraph=True)


WHOLE = ["+fw Outer", "-fw Outer", "+bw Outer", "-bw Outer"]
PARTS = [
    "+fw Outer",
    "+fw Outer.m",
    "-fw Outer.m",
    "+fw Outer.l",
    "-fw Outer.l",
    "-fw Outer",
    "+bw Outer.l",
    "+bw Outer",
    "+bw Outer.m",
    "-bw Outer.l",
    "-bw Outer",
    "-bw Outer.m",
]
FORMS = {
    compile_root: WHOLE,
    compile_root_in_place: WHOLE,
    compile_part: PARTS,
    compile_part_in_place: PARTS,
    compile_function: [],
}


@pytest.fixture
def count_graphs():
    """`count_graphs(name)` returns a backend, and a list that gets an entry per compiled graph."""

    def make(name):
        inner, graphs = torch._dynamo.lookup_backend(name), []

        def backend(graph, inputs):
            graphs.append(graph)
            return inner(graph, inputs)

        return backend, graphs

    return make


@pytest.mark.parametrize("form", FORMS)
def test_compiling_inside_the_tracker_does_not_warn(form, x, log_events, count_graphs):
    """Compiling inside the tracker gives the same events, with at most one recompilation."""
    backend, graphs = count_graphs("aot_eager")
    tracker = ModTracker()
    events = log_events(tracker)
    with tracker:
        run = form(Outer(), backend)
        run(x).sum().backward()
    run(x).sum().backward()
    assert events == FORMS[form]
    assert len(graphs) <= 2


def test_reports_work_around_a_compiled_model(x):
    model = Outer()
    run = torch.compile(model, backend="aot_eager")
    run(x).sum().backward()
    with profile_flops() as report, profile_memory() as memory:
        run(x).sum().backward()
    assert (report["Outer"].total, report.compiled) == (0, ("Outer",))
    assert memory["Outer"].parameters == 2 * (16 + 4) * 4


def test_gradients_of_a_compiled_model_are_bitwise_equal(x, log_events):
    """Gradients of a compiled model under a tracker are bit-identical."""
    model = Outer()
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    expected = torch.autograd.grad(run(x).sum(), [x, *model.parameters()])
    tracker = ModTracker()
    log_events(tracker)
    with tracker:
        found = torch.autograd.grad(run(x).sum(), [x, *model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_user_graph_module_is_a_module():
    """A module that the user traced with torch.fx is tracked like any other."""
    traced = torch.fx.symbolic_trace(nn.Sequential(nn.ReLU()))
    tracker, names = ModTracker(), []
    tracker.register_user_hooks(lambda *_: names.append(tracker.current))
    with tracker:
        nn.Sequential(traced)(torch.ones(1))
    assert names == ["Sequential", "Sequential.0", "Sequential.0.0"]


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_backward_events_come_under_compiled_autograd():
    model, found = Outer(), []
    for context in (nullcontext(), compiled_autograd._enable(torch.compile(backend="eager"))):
        tracker, events = ModTracker(model), []
        tracker.register_user_hooks(
            pre_bw_hook=lambda *_, t=tracker, events=events: events.append(f"+{t.current}"),
            post_bw_hook=lambda *_, t=tracker, events=events: events.append(f"-{t.current}"),
        )
        with tracker:
            loss = model(torch.ones(2, 4, requires_grad=True)).sum()
            with context:
                loss.backward()
        found.append(events)
    assert found[0] == found[1]
    assert len(found[0]) == 8
