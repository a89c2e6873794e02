"""Memory holders, leaks, and pages written when memory runs out."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import mod_tracker

from ._small import shows_saved


def leaf():
    """An input that requires a gradient."""
    return torch.randn(2, 4, requires_grad=True)


class _Blocks(nn.Module):
    """A layer and two more, which `call` runs."""

    def __init__(self, call):
        super().__init__()
        self.first, self.block = nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 8), nn.Tanh())
        self.call = call

    def forward(self, x):
        return self.call(self.block, self.first(x))


@pytest.mark.parametrize("name", ["profile_memory", "watch_memory"])
def test_unused_graph_is_freed(name):
    """By reference count, without a garbage collection."""
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh()), leaf()
    gc.collect()
    gc.disable()
    try:
        with getattr(mod_tracker, name)(model):
            output = model(x)
            storage = weakref.ref(output.untyped_storage())
            del output
            assert storage() is None
    finally:
        gc.enable()


@shows_saved
@pytest.mark.parametrize("kind", ["none", "reentrant", "non-reentrant", "selective"])
def test_what_a_checkpoint_keeps(kind):
    """Its input, and matmul results if the policy saves them."""
    options = {"use_reentrant": kind == "reentrant"}
    if kind == "selective":
        products = [torch.ops.aten.addmm.default]
        options["context_fn"] = lambda: create_selective_checkpoint_contexts(products)

    def call(block, given):
        return block(given) if kind == "none" else checkpoint(block, given, **options)

    model, x = _Blocks(call), leaf()
    with mod_tracker.watch_memory(model) as watch:
        output = model(x)
        page = watch.page()
    given, hidden = 4 * len(x) * 6, 4 * len(x) * 8
    inside = {
        kept: sorted(held.size for held in page.held if held.kind == kept and held.module)
        for kept in ("saved", "checkpoint")
    }
    keeps = {"none": [], "selective": [given, hidden]}.get(kind, [given])
    assert inside["saved"] == ([given, hidden] if kind == "none" else [])
    assert [size for size in inside["checkpoint"] if size in (given, hidden)] == keeps
    assert output.requires_grad
