"""Bytes saved for backward are those that the graph keeps alive, whoever keeps them."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from mod_tracker import profile_memory

from ._small import shows_saved

pytestmark = shows_saved

UNIT = 16 * 8 * 4
"""Bytes of the input and of each activation."""


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x):
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


def selective(model, x):
    """Keep the results of products; the last one is kept although nothing reads it."""
    products = (torch.ops.aten.mm.default,)

    def policy(ctx, op, *args, **kwargs):
        keeps = op in products
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return checkpoint(
        model,
        x,
        use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(policy),
    )


def on_host(model, x):
    with save_on_cpu():
        return model(x)


class Exp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.kept = {"y": [torch.exp(x)]}
        return ctx.kept["y"][0] * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.kept["y"][0] * 2


WAYS = {
    "plain": (lambda model, x: model(x), 3),
    "checkpoint": (lambda model, x: checkpoint(model, x, use_reentrant=False), 1),
    "reentrant": (lambda model, x: checkpoint(model, x, use_reentrant=True), 1),
    "selective": (selective, 4),
    "on the host": (on_host, 3),
    "attribute": (lambda model, x: Exp.apply(x), 1),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("goes_back", [True, False])
def test_saved_bytes_are_those_kept_alive(way, goes_back):
    """With the input, which was made before; a forward alone counts while its result is alive."""
    call, units = WAYS[way]
    model, x = Chain(), torch.randn(16, 8, requires_grad=True)
    with profile_memory(model) as report:
        loss = call(model, x).sum()
        if goes_back:
            loss.backward()
    inner = UNIT * 3 if way == "reentrant" and goes_back else 0  # its graph in the backward
    assert report.totals["saved"] - inner in (units * UNIT, units * UNIT - (UNIT if inner else 0))
    assert report.sum("self_saved") == report.totals["saved"]


def test_each_backward_counts_and_a_second_through_a_graph_does_not():
    model, x = Chain(), torch.randn(16, 8, requires_grad=True)
    with profile_memory(model) as report:
        for _ in range(2):
            loss = model(x).sum()
            loss.backward(retain_graph=True)
            loss.backward()
    assert report.totals["saved"] == 2 * 3 * UNIT
    assert report["a"].saved == 2 * UNIT


def test_graph_from_before_the_block_is_left_out():
    model, x = Chain(), torch.randn(16, 8, requires_grad=True)
    loss = model(x).sum()
    with profile_memory(model) as report:
        loss.backward()
    assert report.totals["saved"] == 0


def test_data_that_a_hook_only_refers_to_is_left_out():
    """A checkpointed function may be a method of an object that holds a data set."""

    class Trainer:
        def __init__(self):
            self.data = [torch.zeros(1000) for _ in range(4)]
            self.model = Chain()

        def step(self, x):
            return self.model(x)

    trainer, x = Trainer(), torch.randn(16, 8, requires_grad=True)
    with profile_memory(trainer.model) as report:
        checkpoint(lambda x: trainer.step(x), x, use_reentrant=False).sum().backward()
    assert report.totals["saved"] == UNIT


def test_report_keeps_no_graph_alive():
    model, x = Chain(), torch.randn(16, 8, requires_grad=True)
    gc.collect()
    gc.disable()
    try:
        with profile_memory(model) as report:
            model(x).sum().backward()
            held = sum(memory.live for memory in report._rows or ())
            out = model(x)
            del out
    finally:
        gc.enable()
    assert held == 0
    assert report.totals["saved"] == 3 * UNIT
