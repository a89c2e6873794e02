"""Plans."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from torchparts_conformance import requirement


class Block(nn.Sequential):
    """A class to select by."""


def is_block(name, module):
    """Whether it is a block."""
    return isinstance(module, Block)


def build(device):
    """An embedding, four blocks and a head."""
    blocks = [Block(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)) for _ in range(4)]
    return nn.Sequential(nn.Embedding(5, 4), nn.ModuleList(blocks), nn.Linear(4, 5)).to(device)


@requirement(
    "CW-090",
    level="MUST",
    text=(
        "A plan MUST change nothing until applied, and applying it twice MUST change what "
        "applying once does."
    ),
    rationale="no other implementation offers it; measured benefit in the package's documentation",
    since="0.1.0",
    profile="plan",
)
def test_plan_then_apply(part, device):
    """Only the planned modules change, once, and the plan shows them."""
    model = build(device)
    before = [type(m) for m in model.modules()]
    plan = part.make_plan(model, is_block)
    assert [type(m) for m in model.modules()] == before
    assert all(name in str(plan) for name in ("1.0", "1.1", "1.2", "1.3", "Block"))
    plan.apply(model)
    once = [type(m) for m in model.modules()]
    plan.apply(model)
    assert [type(m) for m in model.modules()] == once
    assert sum(a is not b for a, b in zip(before, once, strict=True)) == 4
    model[1][0](torch.randn(2, 4, device=device)).sum().backward()


@requirement(
    "CW-091",
    level="MUST",
    text=(
        "A rule, called with name and module, MUST select the modules for which it returns True or "
        "options, and these options MUST reach them."
    ),
    rationale="no other implementation offers it; measured benefit in the package's documentation",
    since="0.1.0",
    profile="plan",
)
def test_rules(part, device):
    """By class, by name, and with options that count calls."""
    model = build(device)
    assert part.make_plan(model, is_block).names == ("1.0", "1.1", "1.2", "1.3")
    assert part.make_plan(model, lambda name, _: name in ("0", "2")).names == ("0", "2")
    calls = []

    def counted(function, *args, **kwargs):
        calls.append(args)
        return function(*args, **kwargs)

    plan = part.make_plan(model, lambda name, _: name == "1.2" and {"checkpoint_fn": counted})
    plan.apply(model)
    for block in model[1]:
        block(torch.randn(2, 4, device=device, requires_grad=True))
    assert len(calls) == 1


@requirement(
    "CW-092",
    level="MUST",
    text="A rule that selects nothing MUST raise and name the classes of the model's modules.",
    rationale="no other implementation offers it; measured benefit in the package's documentation",
    since="0.1.0",
    profile="plan",
)
def test_selecting_nothing(part, device):
    """The error names what there is."""
    with pytest.raises(ValueError, match="Block"):
        part.make_plan(build(device), lambda name, module: name == "blocks.0")


class Scaled(nn.Module):
    """A layer whose result is scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x, scale):
        """Run."""
        return torch.tanh(self.linear(x)) * torch.sin(scale)


@requirement(
    "CW-093",
    level="MUST",
    text=(
        "Errors of backward MUST name a module that a plan changed by its qualified name, under"
        " both implementations."
    ),
    rationale="no other implementation offers it; measured benefit in the package's documentation",
    since="0.1.0",
    profile="plan",
)
def test_errors_of_backward_name_the_module(part, device):
    """An input changed in place, by the name it has in the model and by its class."""
    for impl in part.CheckpointImpl:
        model = nn.ModuleDict({"layers": nn.ModuleList([Scaled(), Scaled()])}).to(device)
        part.make_plan(model, lambda _, m: isinstance(m, Scaled), checkpoint_impl=impl).apply(model)
        x = torch.randn(2, 3, device=device, requires_grad=True)
        scale = torch.ones(3, device=device)
        loss = model["layers"][1](x, scale=scale).sum()
        scale.add_(1)
        with pytest.raises(RuntimeError, match=r"layers\.1.*Scaled"):
            loss.backward()
