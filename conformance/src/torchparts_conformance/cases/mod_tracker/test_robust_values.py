"""Inputs and outputs of modules, and backward through them: cases that torch 2.13 fails."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import nn

from torchparts_conformance import requirement
from torchparts_conformance.cases.mod_tracker._models import (
    backward_of,
    events_in,
    leaf,
    linear,
    names_of,
    products_of,
    step,
)


class ByKeyword(nn.Module):
    """A layer with a keyword input."""

    def __init__(self, device):
        super().__init__()
        self.inner = linear(device)

    def forward(self, *, x):
        """Run the layers."""
        return self.inner(x)


class Chain(nn.Module):
    """Four such layers."""

    def __init__(self, device):
        super().__init__()
        self.k = nn.ModuleList(ByKeyword(device) for _ in range(4))

    def forward(self, x):
        """Run the layers."""
        for k in self.k:
            x = k(x=x)
        return x


@requirement(
    "MT-107",
    "A module with keyword inputs MUST be attributed in backward, with exactly its own operations.",
    rationale=(
        "reproduced on torch 2.13: four chained blocks of 192 FLOPs each count 192, 320, 448, 576"
    ),
)
def test_keyword_inputs(part, device):
    """Each of four blocks has three products, and none is shared."""
    products = products_of(part, lambda: step(Chain(device), leaf(device)))
    counts = Counter(names for _, names in products)
    assert counts == {names_of("Chain", f"Chain.k.{i}", f"Chain.k.{i}.inner"): 3 for i in range(4)}


@dataclass
class Box:
    """An output type that torch does not search for tensors."""

    y: torch.Tensor


class Boxing(nn.Module):
    """Returns a dataclass."""

    def __init__(self, device):
        super().__init__()
        self.inner = linear(device)

    def forward(self, x):
        """Return a dataclass."""
        return Box(self.inner(x))


class Unboxing(nn.Module):
    """Calls a module that returns a dataclass."""

    def __init__(self, device):
        super().__init__()
        self.d, self.o = Boxing(device), linear(device)

    def forward(self, x):
        """Unpack the dataclass."""
        return self.o(self.d(x).y)


@requirement(
    "MT-108",
    "A module whose output is in a dataclass MUST be entered once and left once in backward.",
    rationale="reproduced on torch 2.13: it is left but never entered",
)
def test_dataclass_output(part, device):
    """It is entered once and left once."""
    events = events_in(part, lambda: step(Unboxing(device), leaf(device)))
    assert [e for e in backward_of(events) if e.endswith(".d")] == [
        "+bw Unboxing.d",
        "-bw Unboxing.d",
    ]


@requirement(
    "MT-109",
    "A module that returns its input MUST be entered before it is left, and MUST NOT stay in "
    "`parents`.",
    rationale=(
        "reproduced on torch 2.13: left before it is entered, then in `parents` until the end"
    ),
)
def test_module_returning_its_input(part, device):
    """It is entered and left, and not in `parents` when the layer before it runs."""
    model = nn.Sequential(linear(device), nn.Identity(), linear(device))
    events = backward_of(events_in(part, lambda: step(model, leaf(device))))
    assert [e for e in events if e.endswith(".1")] == ["+bw Sequential.1", "-bw Sequential.1"]
    products = products_of(part, lambda: step(model, leaf(device)))
    assert products[-1] == (True, names_of("Sequential", "Sequential.0"))
