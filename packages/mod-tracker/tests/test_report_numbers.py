"""Numbers of reports: sums, formats, and results beside other threads."""

from __future__ import annotations

import csv
import io
import json
from contextlib import nullcontext
from html.parser import HTMLParser

import pytest
import torch
from torch import nn

import mod_tracker

from ._small import MLP, leaf, step


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


def test_operators_without_a_formula():
    """They are listed, unless the caller gives a formula."""

    model, x = nn.Sequential(nn.Tanh()), torch.ones(3)
    with mod_tracker.profile_flops() as report:
        model(x)
    assert (report.total, report.uncounted) == (0, {"aten.tanh.default": 1})
    formulas = {torch.ops.aten.tanh: lambda shape, *, out_shape: 10 * shape.numel()}
    with mod_tracker.profile_flops(formulas=formulas) as report:
        model(x)
    assert (report["Sequential.0"].forward, report.uncounted) == (30, {})


@pytest.mark.parametrize("name", ["profile_flops", "profile_time", "profile_memory", "trace"])
def test_ways_to_write_a_report(name):
    """Table, JSON, CSV and difference."""
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
    """Results equal those without a report."""
    measured = _gradients(mod_tracker.profile_memory, kind)
    assert torch.equal(measured, _gradients(nullcontext, kind))


def test_formula_that_raises():
    """The model's result is unchanged, the operator is uncounted, everything else is counted."""
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
    """Parsed as HTML: names as text, nothing loaded from elsewhere, each module present."""
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
