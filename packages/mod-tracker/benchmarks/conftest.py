"""Two models, and one interleaved measurement of several ways to run them."""

from __future__ import annotations

import gc
import time

import pytest
import torch
from torch import nn


def chain():
    """200 small layers: 201 module calls, little else."""
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(200)]), torch.randn(2, 4)


def encoder():
    """Six encoder layers: 55 module calls."""
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
    return model, torch.randn(1, 8, 32)


@pytest.fixture(params=[chain, encoder], ids=lambda make: make.__name__)
def model_and_input(request):
    """One of the two models, and an input."""
    torch.manual_seed(0)
    return request.param()


@pytest.fixture
def count_calls():
    """`count_calls(model, x)`: module calls of one forward."""

    def count(model, x):
        calls = []
        handle = nn.modules.module.register_module_forward_pre_hook(
            lambda module, args: calls.append(1) and None
        )
        model(x)
        handle.remove()
        return len(calls)

    return count


@pytest.fixture
def seconds():
    """`seconds(contexts, step)`: least thread-CPU seconds of a step in each context.

    The contexts take turns, so that whatever slows the machine slows all of them.
    """

    def measure(contexts, step, *, rounds=25, steps=5):
        best = dict.fromkeys(contexts, float("inf"))
        for _ in range(rounds):
            for name, context in contexts.items():
                gc.collect()
                gc.disable()
                with context():
                    step()
                    start = time.thread_time()
                    for _ in range(steps):
                        step()
                    took = time.thread_time() - start
                gc.enable()
                best[name] = min(best[name], took / steps)
        return best

    return measure
