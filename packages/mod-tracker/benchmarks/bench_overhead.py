"""What does a tracker cost per module call, beside torch's, with and without hooks?"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch.distributed._tools.mod_tracker import ModTracker as TorchTracker

from mod_tracker import ModTracker


def forward_without_gradients(model, x):
    """Inference."""
    with torch.no_grad():
        model(x)


def forward(model, x):
    """A forward that builds a graph."""
    model(x)


def forward_and_backward(model, x):
    """A training step. A fresh input, because torch's tracker leaves hooks on a leaf."""
    model(x.clone().requires_grad_()).sum().backward()


def hooked(kind):
    """A tracker with four hooks that do nothing."""

    def make():
        tracker = kind()
        tracker.register_user_hooks(*[lambda *args: None] * 4)
        return tracker

    return make


@pytest.mark.parametrize("step", [forward_without_gradients, forward, forward_and_backward])
def test_cost_per_call(step, model_and_input, count_calls, seconds, benchmark, capsys):
    """Without subscribers: at most 1.0 us per call for the chain, 1.5 us for the encoder."""
    model, x = model_and_input
    took = seconds(
        {"plain": nullcontext, "ours": ModTracker, "torch": TorchTracker}, lambda: step(model, x)
    )
    calls = count_calls(model, x)
    cost = {name: (s - took["plain"]) / calls * 1e6 for name, s in took.items()}
    with capsys.disabled():
        print(f"\n{step.__name__}, {calls} calls: {cost['ours']:.2f} us; torch {cost['torch']:.2f}")
    with ModTracker():
        benchmark.pedantic(lambda: step(model, x), rounds=5, warmup_rounds=1)
    assert cost["ours"] <= (1.0 if calls > 100 else 1.5)


def test_cost_per_call_with_four_hooks(model_and_input, count_calls, seconds, benchmark, capsys):
    """With all four user hooks, forward and backward: at most 8 us per call."""
    model, x = model_and_input
    contexts = {"plain": nullcontext, "ours": hooked(ModTracker), "torch": hooked(TorchTracker)}
    took = seconds(contexts, lambda: forward_and_backward(model, x))
    calls = count_calls(model, x)
    cost = {name: (s - took["plain"]) / calls * 1e6 for name, s in took.items()}
    with capsys.disabled():
        print(f"\nfour hooks, {calls} calls: {cost['ours']:.2f} us; torch {cost['torch']:.2f}")
    with contexts["ours"]():
        benchmark.pedantic(lambda: forward_and_backward(model, x), rounds=5, warmup_rounds=1)
    assert cost["ours"] <= 8.0
