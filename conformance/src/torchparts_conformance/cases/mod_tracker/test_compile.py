"""Under torch.compile."""

from __future__ import annotations

from collections import OrderedDict

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
    level="MUST",
    text="Entering and leaving a tracker MUST NOT recompile a compiled model.",
    rationale="pytorch#152740",
    since="0.1.0",
    profile="compile",
)
def test_no_recompilation(part, device):
    """One graph before, inside and after."""
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
    """A part to compile, and one not."""

    def __init__(self, device):
        super().__init__()
        self.m, self.o = MLP(device), linear(device)

    def forward(self, x):
        """Compute."""
        return self.o(self.m(x))


@requirement(
    "MT-402",
    level="MUST",
    text="A compiled part MUST be one module under the user's name, however it was compiled.",
    rationale="reproduced on torch 2.13; pytorch#124196",
    since="0.1.0",
    profile="compile",
)
@pytest.mark.parametrize("in_place", [False, True])
def test_compiled_part(part, device, in_place):
    """Opaque, under its name."""
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


@requirement(
    "MT-403",
    level="MUST",
    text=(
        "Compile-safe hooks MUST be called in forward and backward, in the same order compiled "
        "and not, and change no bit."
    ),
    rationale="pytorch#175583",
    since="0.1.0",
    profile="compile",
)
def test_compile_safe_hooks(part, device):
    """Eager and compiled: the same events and the same bits."""
    model, x, logs = nn.Sequential(linear(device), nn.ReLU()), leaf(device), []
    expected = torch.autograd.grad(model(x).sum(), x)[0]

    def write(kind):
        return lambda name, *_: logs[-1].append(f"{kind} {name}")

    hooks = {f"{kind}_hook": write(kind) for kind in ("pre_fw", "post_fw", "pre_bw", "post_bw")}
    with part.ModTracker.compile_safe_hooks(model, **hooks):
        for run in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
            logs.append([])
            assert torch.equal(torch.autograd.grad(run(x).sum(), x)[0], expected)
    forward = ["pre_fw 0", "post_fw 0", "pre_fw 1", "post_fw 1"]
    assert logs == [[*forward, "pre_bw 1", "post_bw 1", "pre_bw 0", "post_bw 0"]] * 2


class _Named(dict):
    """A mapping with a class of its own, as models return it."""


class _Pair(list):
    """A list of that kind."""


class _Two(nn.Module):
    """Returns two tensors that differ, in a container."""

    def __init__(self, device, container):
        super().__init__()
        self.layer, self.container = linear(device), container

    def forward(self, x):
        """Compute."""
        made = self.layer(x)
        if self.container is _Pair:
            return _Pair([made, made * 2])
        return self.container({"other": made, "first": made * 2})


@requirement(
    "MT-406",
    level="MUST",
    text=(
        "Compile-safe hooks MUST leave every tensor of an output in its place, in mappings and "
        "lists of any class too."
    ),
    rationale=(
        "reproduced: tensors of a class derived from dict got each other's values, without a word"
    ),
    since="0.1.0",
    profile="compile",
)
@pytest.mark.parametrize("container", [dict, OrderedDict, _Named, _Pair])
def test_compile_safe_hooks_leave_outputs_in_place(part, device, container):
    """Each key has its tensor, in the order and class of the plain output; gradients are right."""
    model, x, called = nn.Sequential(_Two(device, container)), leaf(device), []
    expected = model(x)
    keys = [0, 1] if container is _Pair else ["other", "first"]
    gradient = torch.autograd.grad(expected[keys[1]].sum(), x)[0]
    with part.ModTracker.compile_safe_hooks(model, pre_bw_hook=lambda *_: called.append(1)):
        found = model(x)
        passed = torch.autograd.grad(found[keys[1]].sum(), x)[0]
    assert type(found) is container
    assert container is _Pair or list(found) == keys
    assert all(torch.equal(found[key], expected[key]) for key in keys)
    assert torch.equal(passed, gradient)
    assert called


@requirement(
    "MT-411",
    level="MUST",
    text=(
        "A report MUST name the modules that ran compiled, whose parts it could not tell apart,"
        " and no others."
    ),
    rationale="a compiled model is one row, which looks like a model without parts",
    since="0.1.0",
    profile="compile",
)
@pytest.mark.parametrize("name", ["profile_flops", "profile_time", "profile_memory", "trace"])
@pytest.mark.parametrize("in_place", [False, True])
def test_reports_name_what_ran_compiled(part, device, name, in_place):
    """By the user's name, and only where something did."""
    model, x = Outer(device), leaf(device)
    with getattr(part, name)(model) as report:
        model(x)
    assert not any("compiled" in note for note in report.notes)
    if in_place:
        model.m.compile(backend="aot_eager")
    else:
        model.m = torch.compile(model.m, backend="aot_eager")
    with getattr(part, name)(model) as report:
        model(x)
    (note,) = (note for note in report.notes if "compiled" in note)
    assert "Outer.m" in note
    assert "Outer.o" not in note
    assert note in report.table()


@requirement(
    "MT-415",
    level="MUST",
    text=(
        "FLOPs of the modules inside a compiled one MUST be those of the model that is not "
        "compiled, in forward and in backward, where its backend keeps the modules."
    ),
    rationale="the compiler's graphs name the modules of every operator",
    since="0.1.0",
    profile="compile",
)
def test_flops_inside_compiled_code(part, device):
    """Of every module, compiled and not."""
    model, x = MLP(device), leaf(device)

    def flops(run):
        with part.profile_flops(model) as report:
            run(x).sum().backward()
        assert report.total == report.sum("self_total") > 0
        return {name: (row.forward, row.backward) for name, row in report.rows.items()}

    compiled = torch.compile(model, backend=part.backend_by_module("aot_eager"))
    assert flops(compiled) == flops(model)
