"""Numbers of reports: their sums, their forms, and who is beside them."""

from __future__ import annotations

import csv
import io
import json
from contextlib import nullcontext
from html.parser import HTMLParser

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import mod_tracker


def linear():
    """A 4 x 4 layer without bias: each product has 2 * rows * 16 operations."""
    return nn.Linear(4, 4, bias=False)


def leaf():
    """An input that requires a gradient."""
    return torch.randn(2, 4, requires_grad=True)


def step(model, *args, **kwargs):
    """One forward and backward."""
    model(*args, **kwargs).sum().backward()


class MLP(nn.Module):
    """Two layers with a relu between them."""

    def __init__(self):
        super().__init__()
        self.a, self.b = linear(), linear()

    def forward(self, x):
        """Compute."""
        return self.b(self.a(x).relu())


class Checkpointed(nn.Module):
    """A checkpointed MLP and a layer."""

    def __init__(self, *, use_reentrant):
        super().__init__()
        self.m, self.out = MLP(), linear()
        self.use_reentrant = use_reentrant

    def forward(self, x):
        """Compute."""
        return self.out(checkpoint(self.m, x, use_reentrant=self.use_reentrant))


def _gradients(measure, kind):
    x = torch.linspace(-8, 8, 2048).requires_grad_()
    with measure():
        kind()(x).square().sum().backward()
    return x.grad


class _Page(HTMLParser):
    """Elements, addresses and text of a page."""

    def __init__(self, page):
        super().__init__()
        self.elements, self.addresses, self.words = set(), [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.elements.add(tag)
        loads = ("src", "href", "xlink:href", "action", "data", "srcset")
        self.addresses += [value for name, value in attrs if name in loads]
        self.words += [value for name, value in attrs if name not in loads and value]

    def handle_data(self, data):
        self.words.append(data)


class Outer(nn.Module):
    """A part to compile, and one not."""

    def __init__(self):
        super().__init__()
        self.m, self.o = MLP(), linear()

    def forward(self, x):
        """Compute."""
        return self.o(self.m(x))


@pytest.mark.parametrize("use_reentrant", [None, False, True])
def test_flops_of_a_step(use_reentrant):
    """A product is 64: one forward and two in backward, and some once more in a checkpoint."""
    plain = use_reentrant is None
    model = MLP() if plain else Checkpointed(use_reentrant=use_reentrant)
    layers = sum(isinstance(inner, nn.Linear) for inner in model.modules())
    with mod_tracker.profile_flops() as report:
        step(model, leaf())
    # A checkpoint that is not reentrant stops where the last saved tensor is there again.
    again = 0 if plain else (layers - 1 if use_reentrant else layers - 2)
    assert report.total == (3 * layers + again) * 64


def test_operators_without_a_formula():
    """Listed, unless the caller has one."""

    model, x = nn.Sequential(nn.Tanh()), torch.ones(3)
    with mod_tracker.profile_flops() as report:
        model(x)
    assert (report.total, report.uncounted) == (0, {"aten.tanh.default": 1})
    formulas = {torch.ops.aten.tanh: lambda shape, *, out_shape: 10 * shape.numel()}
    with mod_tracker.profile_flops(formulas=formulas) as report:
        model(x)
    assert (report["Sequential.0"].forward, report.uncounted) == (30, {})


def test_formula_of_the_caller():
    """Ten for each number; without it, nothing."""
    model, x = nn.Sequential(nn.Tanh()), torch.ones(3)
    formulas = {torch.ops.aten.tanh: lambda shape, *, out_shape: 10 * shape.numel()}
    for given, count in ((None, 0), (formulas, 30)):
        with mod_tracker.profile_flops(formulas=given) as report:
            model(x)
        assert report.total == count


def test_times_add_up():
    """To the nanosecond."""
    with mod_tracker.profile_time() as report:
        step(MLP(), leaf())
    assert report.total == report.sum("self_total") > 0
    assert {"MLP", "MLP.a", "MLP.b"} <= set(report.rows)
    assert report["MLP.b"].backward > 0


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_bytes_add_up(use_reentrant):
    """Allocated, freed and saved."""
    model = Checkpointed(use_reentrant=use_reentrant)
    with mod_tracker.profile_memory() as report:
        step(model, leaf())
    for kind, total in report.totals.items():
        assert report.sum(f"self_{kind}") == total, kind
    assert report.totals["parameters"] == report.totals["gradients"] == 3 * 16 * 4
    assert report.totals["saved"] > 0


def test_model_that_fits_nowhere():
    """Four terabytes of parameters."""
    with FakeTensorMode(), mod_tracker.profile_memory() as report:
        size = 10**6
        model = nn.Linear(size, size, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step(model, torch.empty(1, size))
        optimizer.step()
    assert report["Linear"].parameters == report["Linear"].gradients == 4 * size**2
    assert report.peak >= 8 * size**2


def test_trace_is_well_formed():
    """Balanced, nested, in order, with both directions of the same calls."""
    with mod_tracker.trace(memory=True) as report:
        step(Checkpointed(use_reentrant=True), leaf())
    events = json.loads(report.to_json())["traceEvents"]
    times = [event["ts"] for event in events]
    assert times == sorted(times)
    opened, calls = [], {"forward": set(), "backward": set(), "recompute": set()}
    for event in events:
        if event["ph"] == "B":
            opened.append(event["name"])
            calls[event["cat"]].add(event["args"]["call"])
        elif event["ph"] == "E":
            assert opened.pop() == event["name"]
    assert not opened
    assert any(event["ph"] == "C" for event in events)
    assert len(calls["forward"]) == 5
    assert len(calls["forward"] & calls["backward"]) >= 3


@pytest.mark.parametrize("name", ["profile_flops", "profile_time", "profile_memory", "trace"])
def test_ways_to_write_a_report(name):
    """Table, JSON, CSV, difference."""
    with getattr(mod_tracker, name)() as report:
        step(MLP(), leaf())
    assert "MLP.a" in report.table()
    assert json.loads(report.to_json())
    rows = list(csv.DictReader(io.StringIO(report.to_csv())))
    assert {"MLP", "MLP.a", "MLP.b"} <= {row["name"] for row in rows}
    same = report.diff(report)
    assert same.total == 0
    assert all(getattr(row, column) == 0 for row in same for column in same.columns)


@pytest.mark.parametrize("kind", [nn.SiLU, nn.Mish])
def test_measuring_memory_changes_no_bit(kind):
    """As without anybody looking."""
    measured = _gradients(mod_tracker.profile_memory, kind)
    assert torch.equal(measured, _gradients(nullcontext, kind))


def test_flops_of_a_branch():
    """The one that runs."""
    x = torch.ones(4, 4)
    for taken, count in ((True, 128), (False, 256)):
        with mod_tracker.profile_flops() as report:
            torch.cond(torch.tensor(taken), lambda x: x @ x, lambda x: x @ x @ x, (x,))
        assert report.total == count


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype:UserWarning")
def test_flops_of_jagged_tensors():
    """Seven rows in two pieces, forward and the gradient of the weight."""
    pieces = [torch.ones(rows, 5) for rows in (3, 4)]
    x = torch.nested.nested_tensor(pieces, layout=torch.jagged)
    with mod_tracker.profile_flops() as report:
        nn.Linear(5, 6)(x).values().sum().backward()
    assert report.total == 2 * (2 * 7 * 5 * 6)


def test_formula_that_raises():
    """The model's result is there, the operator among the uncounted, everything else counted."""
    x = torch.ones(4, 4)

    def formula(*shapes, out_shape):
        raise ZeroDivisionError

    model = nn.Sequential(nn.Tanh(), nn.Linear(4, 4, bias=False))
    with mod_tracker.profile_flops(formulas={torch.ops.aten.tanh: formula}) as report:
        made = model(x)
    assert made.shape == (4, 4)
    assert report.uncounted["aten.tanh.default"] == 1
    assert report.total == 128
    assert "aten.tanh" in report.table()


@pytest.mark.parametrize("name", ["profile_flops", "profile_time", "profile_memory", "trace"])
def test_page_of_a_report(name):
    """Read as a browser would: names as text, nothing loaded, each module there."""
    odd = nn.ModuleDict({"<u>a": nn.Linear(4, 4)})
    model = nn.Sequential(MLP(), odd["<u>a"])
    with getattr(mod_tracker, name)(odd) as report:
        step(model, leaf())
    page = report.to_html()
    read = _Page(page)
    assert "u" not in read.elements
    assert [address for address in read.addresses if not address.startswith(("#", "data:"))] == []
    assert not any(word in page for word in ("@import", "url(", "fetch(", "XMLHttpRequest"))
    text = " ".join(read.words)
    assert all(known in text for known in ("ModuleDict.<u>a", "Sequential.0.a", "Sequential.0.b"))


@pytest.mark.parametrize("name", ["profile_flops", "profile_time", "profile_memory", "trace"])
@pytest.mark.parametrize("in_place", [False, True])
def test_reports_name_what_ran_compiled(name, in_place):
    """By the user's name, and only where something did."""
    model, x = Outer(), leaf()
    with getattr(mod_tracker, name)(model) as report:
        model(x)
    assert not any("compiled" in note for note in report.notes)
    if in_place:
        model.m.compile(backend="aot_eager")
    else:
        model.m = torch.compile(model.m, backend="aot_eager")
    with getattr(mod_tracker, name)(model) as report:
        model(x)
    (note,) = (note for note in report.notes if "compiled" in note)
    assert "Outer.m" in note
    assert "Outer.o" not in note
    assert note in report.table()
