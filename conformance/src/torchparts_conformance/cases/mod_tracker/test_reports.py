"""Reports add up, and say what they are asked for."""

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
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from torchparts_conformance import requirement
from torchparts_conformance.cases.mod_tracker._models import MLP, Checkpointed, leaf, linear, step


@requirement(
    "MT-301",
    level="MUST",
    text=(
        "FLOPs of modules themselves and outside MUST add up to the total, which MUST be that "
        "of torch's counter."
    ),
    rationale="a report that does not add up is wrong somewhere",
    since="0.1.0",
    profile="reports",
    group="splitting",
)
def test_flops_add_up(part, device):
    """Rows, total and torch's counter agree."""
    model, x = Checkpointed(device, use_reentrant=False), leaf(device)
    with FlopCounterMode(display=False) as counter:
        step(model, x)
    with part.profile_flops() as report:
        step(model, x)
        x @ x.T
    assert report.outside.total == 2 * 2 * 2 * 4
    assert report.total == report.sum("self_total") == counter.get_total_flops() + 32


@requirement(
    "MT-422",
    level="MUST",
    text=(
        "FLOPs of a step MUST be those of its products in forward and backward, and of those "
        "that a checkpoint carries out again."
    ),
    rationale="what a count is for; whoever has no rows still has a total",
    since="0.1.0",
    profile="reports",
    group="counting",
)
@pytest.mark.parametrize("use_reentrant", [None, False, True])
def test_flops_of_a_step(part, device, use_reentrant):
    """A product is 64: one forward and two in backward, and some once more in a checkpoint."""
    plain = use_reentrant is None
    model = MLP(device) if plain else Checkpointed(device, use_reentrant=use_reentrant)
    layers = sum(isinstance(inner, nn.Linear) for inner in model.modules())
    with part.profile_flops() as report:
        step(model, leaf(device))
    # A checkpoint that is not reentrant stops where the last saved tensor is there again.
    again = 0 if plain else (layers - 1 if use_reentrant else layers - 2)
    assert report.total == (3 * layers + again) * 64


@requirement(
    "MT-302",
    level="MUST",
    text=(
        "FLOPs MUST be split into forward, recompute and backward exactly, with both kinds of "
        "checkpointing."
    ),
    rationale="a report that does not add up is wrong somewhere",
    since="0.1.0",
    profile="reports",
    group="splitting",
)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_flops_are_split_by_phase(part, device, use_reentrant):
    """A product is 64: one forward, at most one again, two in backward."""
    with part.profile_flops() as report:
        step(Checkpointed(device, use_reentrant=use_reentrant), leaf(device))
    rows = {name: report[f"Checkpointed.{name}"] for name in ("m.a", "m.b", "out")}
    split = {name: (row.forward, row.recompute, row.backward) for name, row in rows.items()}
    again = 64 if use_reentrant else 0
    assert split == {"m.a": (64, 64, 128), "m.b": (64, again, 128), "out": (64, 0, 128)}


@requirement(
    "MT-412",
    level="MUST",
    text=(
        "What a checkpoint runs again between the modules in it MUST be recompute, of the "
        "module that ran it."
    ),
    rationale=(
        "reproduced on a UNet of others: attention that ran again was backward of another module"
    ),
    since="0.1.0",
    profile="reports",
    group="splitting",
)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_flops_between_modules_of_a_checkpoint(part, device, use_reentrant):
    """A product of the region's own, between two layers."""

    class Between(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.w = linear(device), linear(device), linear(device).weight

        def region(self, x):
            return self.b((self.a(x).tanh() @ self.w).tanh())

        def forward(self, x):
            return checkpoint(self.region, x, use_reentrant=use_reentrant)

    with part.profile_flops() as report:
        step(Between(), leaf(device))
    split = {name: (row.self_recompute, row.self_backward) for name, row in report.rows.items()}
    again = 64 if use_reentrant else 0
    assert split == {"Between": (64, 128), "Between.a": (64, 128), "Between.b": (again, 128)}


@requirement(
    "MT-303",
    level="MUST",
    text="Operators without a formula MUST be listed, and counted once the caller gives one.",
    rationale="never silently zero",
    since="0.1.0",
    profile="reports",
    group="splitting",
)
def test_operators_without_a_formula(part, device):
    """Listed, unless the caller has one."""

    model, x = nn.Sequential(nn.Tanh()), torch.ones(3, device=device)
    with part.profile_flops() as report:
        model(x)
    assert (report.total, report.uncounted) == (0, {"aten.tanh.default": 1})
    formulas = {torch.ops.aten.tanh: lambda shape, *, out_shape: 10 * shape.numel()}
    with part.profile_flops(formulas=formulas) as report:
        model(x)
    assert (report["Sequential.0"].forward, report.uncounted) == (30, {})


@requirement(
    "MT-423",
    level="MUST",
    text="A formula that the caller gives MUST be used for an operator that has none.",
    rationale="kernels of one's own have no formula, and a total that leaves them out is wrong",
    since="0.1.0",
    profile="reports",
    group="counting",
)
def test_formula_of_the_caller(part, device):
    """Ten for each number; without it, nothing."""
    model, x = nn.Sequential(nn.Tanh()), torch.ones(3, device=device)
    formulas = {torch.ops.aten.tanh: lambda shape, *, out_shape: 10 * shape.numel()}
    for given, count in ((None, 0), (formulas, 30)):
        with part.profile_flops(formulas=given) as report:
            model(x)
        assert report.total == count


@requirement(
    "MT-304",
    level="MUST",
    text="Times of modules themselves and outside MUST add up to the total.",
    rationale="a report that does not add up is wrong somewhere",
    since="0.1.0",
    profile="reports",
    group="time",
)
def test_times_add_up(part, device):
    """To the nanosecond."""
    with part.profile_time() as report:
        step(MLP(device), leaf(device))
    assert report.total == report.sum("self_total") > 0
    assert {"MLP", "MLP.a", "MLP.b"} <= set(report.rows)
    assert report["MLP.b"].backward > 0


@requirement(
    "MT-305",
    level="MUST",
    text=(
        "Bytes allocated, freed and saved by modules themselves and outside MUST add up to "
        "their totals."
    ),
    rationale="a report that does not add up is wrong somewhere",
    since="0.1.0",
    profile="reports",
    group="memory",
)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_bytes_add_up(part, device, use_reentrant):
    """Allocated, freed and saved."""
    model = Checkpointed(device, use_reentrant=use_reentrant)
    with part.profile_memory() as report:
        step(model, leaf(device))
    for kind, total in report.totals.items():
        assert report.sum(f"self_{kind}") == total, kind
    assert report.totals["parameters"] == report.totals["gradients"] == 3 * 16 * 4
    assert report.totals["saved"] > 0


@requirement(
    "MT-306",
    level="MUST",
    text="A model that fits nowhere MUST be measured under FakeTensorMode.",
    rationale="planning before there is a machine",
    since="0.1.0",
    profile="reports",
    group="memory",
)
def test_model_that_fits_nowhere(part, device):
    """Four terabytes of parameters."""
    with FakeTensorMode(), part.profile_memory() as report:
        size = 10**6
        model = nn.Linear(size, size, bias=False, device=device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step(model, torch.empty(1, size, device=device))
        optimizer.step()
    assert report["Linear"].parameters == report["Linear"].gradients == 4 * size**2
    assert report.peak >= 8 * size**2


@requirement(
    "MT-307",
    level="MUST",
    text=(
        "A trace MUST be balanced and nested, its times never decreasing, with a forward and a "
        "backward slice of the same call."
    ),
    rationale="the trace-event format",
    since="0.1.0",
    profile="reports",
    group="trace",
)
def test_trace_is_well_formed(part, device):
    """Balanced, nested, in order, with both directions of the same calls."""
    with part.trace(memory=True) as report:
        step(Checkpointed(device, use_reentrant=True), leaf(device))
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


@requirement(
    "MT-308",
    level="MUST",
    text=(
        "Every report MUST write a table, JSON and CSV, and the difference to itself MUST be zero."
    ),
    rationale="what people do with reports",
    since="0.1.0",
    profile="reports",
    group="writing",
)
@pytest.mark.parametrize("name", ["profile_flops", "profile_time", "profile_memory", "trace"])
def test_ways_to_write_a_report(part, device, name):
    """Table, JSON, CSV, difference."""
    with getattr(part, name)() as report:
        step(MLP(device), leaf(device))
    assert "MLP.a" in report.table()
    assert json.loads(report.to_json())
    rows = list(csv.DictReader(io.StringIO(report.to_csv())))
    assert {"MLP", "MLP.a", "MLP.b"} <= {row["name"] for row in rows}
    same = report.diff(report)
    assert same.total == 0
    assert all(getattr(row, column) == 0 for row in same for column in same.columns)


def _gradients(measure, kind, device):
    x = torch.linspace(-8, 8, 2048, device=device).requires_grad_()
    with measure():
        kind()(x).square().sum().backward()
    return x.grad


@requirement(
    "MT-404",
    level="MUST",
    text=(
        "Counting operations MUST NOT change a bit of the gradients, also of operators that "
        "have both parts and a kernel of their own."
    ),
    rationale="reproduced: counting took the backward of SiLU apart",
    since="0.1.0",
    profile="reports",
    group="counting",
)
@pytest.mark.parametrize("kind", [nn.SiLU, nn.Mish])
def test_counting_changes_no_bit(part, device, kind):
    """Operators with a kernel of their own are left to it."""
    counted = _gradients(part.profile_flops, kind, device)
    assert torch.equal(counted, _gradients(nullcontext, kind, device))


@requirement(
    "MT-420",
    level="MUST",
    text=(
        "Measuring memory MUST NOT change a bit of the gradients, also of operators that have "
        "both parts and a kernel of their own."
    ),
    rationale="reproduced: a report that took the backward of SiLU apart changed it",
    since="0.1.0",
    profile="reports",
    group="watching",
)
@pytest.mark.parametrize("kind", [nn.SiLU, nn.Mish])
def test_measuring_memory_changes_no_bit(part, device, kind):
    """As without anybody looking."""
    measured = _gradients(part.profile_memory, kind, device)
    assert torch.equal(measured, _gradients(nullcontext, kind, device))


@requirement(
    "MT-405",
    level="MUST",
    text=(
        "FLOPs of jagged nested tensors and of `torch.cond` MUST be those of the products that "
        "are carried out."
    ),
    rationale="reproduced: the process was aborted, and torch.compile refused",
    since="0.1.0",
    profile="reports",
    group="counting",
)
def test_flops_of_a_branch(part, device):
    """The one that runs."""
    x = torch.ones(4, 4, device=device)
    for taken, count in ((True, 128), (False, 256)):
        with part.profile_flops() as report:
            torch.cond(
                torch.tensor(taken, device=device), lambda x: x @ x, lambda x: x @ x @ x, (x,)
            )
        assert report.total == count


@requirement("MT-405")
@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype:UserWarning")
def test_flops_of_jagged_tensors(part, device):
    """Seven rows in two pieces, forward and the gradient of the weight."""
    pieces = [torch.ones(rows, 5, device=device) for rows in (3, 4)]
    x = torch.nested.nested_tensor(pieces, layout=torch.jagged)
    with part.profile_flops() as report:
        nn.Linear(5, 6, device=device)(x).values().sum().backward()
    assert report.total == 2 * (2 * 7 * 5 * 6)


@requirement(
    "MT-407",
    level="MUST",
    text=(
        "FLOPs of products of groups, as in a mixture of experts, MUST be those of the "
        "products, on every device."
    ),
    rationale=(
        "seen on models of others: torch's counter has no formula for them, so that experts "
        "count as nothing"
    ),
    since="0.1.0",
    profile="reports",
    group="counting",
)
def test_flops_of_products_of_groups(part, device):
    """Two experts with eight rows in all: forward and both gradients; before torch 2.10 as rows."""
    x, w = (torch.ones(*s, device=device, requires_grad=True) for s in ((8, 16), (2, 16, 32)))
    product = getattr(nn.functional, "grouped_mm", None)
    with part.profile_flops() as report:
        if product is None:
            made = torch.cat([x[:3] @ w[0], x[3:] @ w[1]])
        else:
            ends = torch.tensor([3, 8], dtype=torch.int32, device=device)
            made = product(x.bfloat16(), w.bfloat16(), offs=ends)
        made.square().sum().backward()
    assert report.total == 3 * (2 * 8 * 16 * 32)


@requirement(
    "MT-408",
    level="MUST",
    text=(
        "FLOPs of attention MUST be those of its products in every kernel that torch has for "
        "it, with heads that share keys, too."
    ),
    rationale=(
        "seen on models of others: torch's counter has no formula for the CPU's kernel, so that"
        " attention counts as nothing there"
    ),
    since="0.1.0",
    profile="reports",
    group="splitting",
)
@pytest.mark.parametrize("heads", [4, 2], ids=["own keys", "shared keys"])
def test_flops_of_attention(part, device, heads):
    """In each kernel that the device has: forward two products, in backward four or, where the
    first was not kept, five."""

    class Attention(nn.Module):
        def forward(self, q, k, v):
            return nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=heads < 4)

    def given(count):
        x = torch.ones(2, count, 16, 32, device=device, dtype=torch.bfloat16)
        return x.requires_grad_()

    inputs, counted = (given(4), given(heads), given(heads)), []
    for kernel in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        with sdpa_kernel(kernel):
            try:
                Attention()(*inputs)
            except RuntimeError:
                continue  # the device has none for this
            with part.profile_flops() as report:
                Attention()(*inputs).sum().backward()
        counted.append((report["Attention"].forward, report["Attention"].backward))
    product = 2 * (2 * 4) * 16 * 16 * 32
    assert counted
    assert {forward for forward, _ in counted} == {2 * product}
    assert {backward for _, backward in counted} <= {4 * product, 5 * product}


@requirement(
    "MT-409",
    level="MUST",
    text=(
        "A formula that raises MUST NOT stop the model that is measured, and the report MUST "
        "name its operator as uncounted."
    ),
    rationale=(
        "reproduced: a formula runs inside the model's own call, so that its error was the model's"
    ),
    since="0.1.0",
    profile="reports",
    group="counting",
)
def test_formula_that_raises(part, device):
    """The model's result is there, the operator among the uncounted, everything else counted."""
    x = torch.ones(4, 4, device=device)

    def formula(*shapes, out_shape):
        raise ZeroDivisionError

    model = nn.Sequential(nn.Tanh(), nn.Linear(4, 4, device=device, bias=False))
    with part.profile_flops(formulas={torch.ops.aten.tanh: formula}) as report:
        made = model(x)
    assert made.shape == (4, 4)
    assert report.uncounted["aten.tanh.default"] == 1
    assert report.total == 128
    assert "aten.tanh" in report.table()


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


@requirement(
    "MT-410",
    level="MUST",
    text=(
        "A report MUST be drawn as one page that loads nothing from elsewhere, with every "
        "module and its amount, and names MUST NOT be taken for markup."
    ),
    rationale="a page is mailed, kept with a run, and opened where there is no network",
    since="0.1.0",
    profile="reports",
    group="writing",
)
@pytest.mark.parametrize("name", ["profile_flops", "profile_time", "profile_memory", "trace"])
def test_page_of_a_report(part, device, name):
    """Read as a browser would: names as text, nothing loaded, each module there."""
    odd = nn.ModuleDict({"<u>a": nn.Linear(4, 4, device=device)})
    model = nn.Sequential(MLP(device), odd["<u>a"])
    with getattr(part, name)(odd) as report:
        step(model, leaf(device))
    page = report.to_html()
    read = _Page(page)
    assert "u" not in read.elements
    assert [address for address in read.addresses if not address.startswith(("#", "data:"))] == []
    assert not any(word in page for word in ("@import", "url(", "fetch(", "XMLHttpRequest"))
    text = " ".join(read.words)
    assert all(known in text for known in ("ModuleDict.<u>a", "Sequential.0.a", "Sequential.0.b"))
