"""All parts together under torch.compile."""

from __future__ import annotations

import torch

from torchparts_conformance import requirement
from torchparts_conformance.cases.combined._training import (
    PRODUCTS,
    batch,
    checkpoint_blocks,
    make_model,
)


def _gradients(model, call, device):
    call(batch(0, device)).square().mean().backward()
    return {name: p.grad.detach().clone() for name, p in model.named_parameters()}


def _assert_plain(found, device):
    plain = make_model(device)
    for name, value in _gradients(plain, plain, device).items():
        torch.testing.assert_close(found[name], value)


@requirement(
    "CB-040",
    "A compiled model checkpointed in place through a selective policy MUST give the gradients of"
    " the plain model.",
    rationale="compiled code takes a different path through both packages",
    profile="compile",
)
def test_compiled_selective_gives_plain_gradients(parts, device):
    """Compiled to one graph, the gradients are those of the plain model."""
    model = checkpoint_blocks(parts, make_model(device), PRODUCTS)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    _assert_plain(_gradients(model, compiled, device), device)
