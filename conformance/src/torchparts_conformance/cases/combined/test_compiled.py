"""The parts together under torch.compile."""

from __future__ import annotations

import torch

from torchparts_conformance import requirement
from torchparts_conformance.cases.combined._training import (
    NAMES,
    PRODUCTS,
    Seen,
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
    level="MUST",
    text=(
        "A compiled model checkpointed in place through a selective policy MUST give the "
        "gradients of the plain model."
    ),
    rationale="compiled code takes another path through both packages",
    since="0.1.0",
    profile="compile",
)
def test_compiled_selective_gives_plain_gradients(parts, device):
    """Compiled in one graph, the gradients are those of the plain model."""
    model = checkpoint_blocks(parts, make_model(device), PRODUCTS)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    _assert_plain(_gradients(model, compiled, device), device)


@requirement(
    "CB-041",
    level="MUST",
    text=(
        "A compiled flat model with checkpointed blocks MUST give the gradients of the plain "
        "model in one graph."
    ),
    rationale="views of one buffer are inputs of the graph",
    since="0.1.0",
    profile="compile",
)
def test_compiled_flat_gives_plain_gradients(parts, device):
    """A flat, checkpointed model compiles in one graph to the plain gradients."""
    model = make_model(device)
    parts.flat_param.flatten(model)
    checkpoint_blocks(parts, model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    _assert_plain(_gradients(model, compiled, device), device)


@requirement(
    "CB-042",
    level="MUST",
    text=(
        "All four parts on one compiled model MUST give the gradients and the names of the "
        "plain model."
    ),
    rationale="the reason for one suite",
    since="0.1.0",
    profile="compile",
)
def test_all_four_compiled_give_plain_gradients(parts, device):
    """Flat, selective, compiled and then tracked in eager: gradients and names hold."""
    model = make_model(device)
    flat = parts.flat_param.flatten(model)
    checkpoint_blocks(parts, model, PRODUCTS)
    compiled = torch.compile(model, backend="aot_eager")
    seen = Seen(parts, model)
    _assert_plain(_gradients(model, compiled, device), device)
    flat.zero_grad()
    with seen.watching():
        found = _gradients(model, model, device)
    _assert_plain(found, device)
    assert seen.names["forward"] == NAMES
