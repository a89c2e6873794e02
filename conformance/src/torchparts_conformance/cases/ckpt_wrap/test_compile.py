"""Compilers: one graph, and the plain names."""

from __future__ import annotations

import copy
from functools import partial

import torch
from torch import nn

from torchparts_conformance import requirement


class Block(nn.Module):
    """A block with a keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, *, scale=1.0):
        """Run."""
        return torch.tanh(self.linear(x) * scale)


class Model(nn.Module):
    """One block, called with its keyword."""

    def __init__(self, block) -> None:
        super().__init__()
        self.block = block

    def forward(self, x):
        """Run."""
        return self.block(x, scale=2.0)


def compiles(wrap, device):
    """Compile to one graph and compare gradients with the plain block's."""
    torch.compiler.reset()
    plain = Model(Block()).to(device)
    model = Model(wrap(copy.deepcopy(plain.block)))
    x = torch.randn(3, 8, device=device, requires_grad=True)
    plain(x).sum().backward()
    expected, x.grad = x.grad, None
    torch.compile(model, fullgraph=True, backend="aot_eager")(x).sum().backward()
    torch.testing.assert_close(x.grad, expected)


@requirement(
    "CW-080",
    level="MUST",
    text="`torch.compile(fullgraph=True)` MUST work for both implementations and both layers.",
    rationale="no other implementation offers it; measured benefit in the package's documentation",
    since="0.1.0",
    profile="compile",
)
def test_checkpoint_compiles(part, device):
    """Both implementations, both layers."""
    for impl in part.CheckpointImpl:
        for make in (part.checkpoint_, part.checkpoint_wrapper):
            compiles(partial(make, checkpoint_impl=impl), device)


@requirement(
    "CW-082",
    level="MUST",
    text=(
        "`torch.export` MUST work, strict and not, with the plain model's names for modules "
        "changed in place."
    ),
    rationale="no other implementation offers it; measured benefit in the package's documentation",
    since="0.1.0",
    profile="compile",
)
def test_export(part, device):
    """Strict and not."""
    x = torch.randn(3, 8, device=device)
    for change in (part.checkpoint_, part.offload_):
        model = Model(change(Block())).to(device)
        for strict in (True, False):
            program = torch.export.export(model, (x,), strict=strict)
            assert list(program.state_dict) == list(model.state_dict())
            assert torch.equal(program.module()(x), model(x))
