"""torch.compile and torch.export of wrapped modules: one graph, and plain names."""

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
        """Call both layers."""
        return torch.tanh(self.linear(x) * scale)


class Model(nn.Module):
    """One block, called with its keyword."""

    def __init__(self, block) -> None:
        super().__init__()
        self.block = block

    def forward(self, x):
        """Call the block."""
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
    "`torch.compile(fullgraph=True)` MUST compile a wrapped module into one graph with the plain "
    "module's gradients, under both implementations.",
    rationale="a graph break at each block costs more than compiling saves",
    profile="compile",
)
def test_checkpoint_compiles(part, device):
    """Under both implementations."""
    for impl in part.CheckpointImpl:
        compiles(partial(part.checkpoint_wrapper, checkpoint_impl=impl), device)


@requirement(
    "CW-082",
    "`torch.export`, strict and not strict, MUST export a model with a wrapped module, under the "
    "names of its state dict.",
    rationale="a model trained with wrappers can then be exported without building it again",
    profile="compile",
)
def test_export(part, device):
    """Strict and not strict."""
    x = torch.randn(3, 8, device=device)
    model = Model(part.checkpoint_wrapper(Block())).to(device)
    for strict in (True, False):
        program = torch.export.export(model, (x,), strict=strict)
        assert list(program.state_dict) == list(model.state_dict())
        assert torch.equal(program.module()(x), model(x))
