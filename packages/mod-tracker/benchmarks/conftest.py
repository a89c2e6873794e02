"""Two models, and an interleaved measurement of several contexts."""

from __future__ import annotations

import gc
import random
import time

import pytest
import torch
from torch import nn


def chain():
    """200 small layers: 201 module calls with little other work."""
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(200)]), torch.randn(2, 4)


def encoder():
    """Six encoder layers in training mode, so that none runs as one fused kernel: 55 calls."""
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
    return model, torch.randn(1, 8, 32)


@pytest.fixture(autouse=True)
def _one_thread():
    torch.manual_seed(0)
    torch.set_num_threads(1)


@pytest.fixture(params=[chain, encoder], ids=lambda make: make.__name__)
def model_and_input(request):
    """One of the two models, and an input."""
    return request.param()


@pytest.fixture
def count_calls():
    """`count_calls(step, model, x)`: module calls of one forward."""

    def count(step, model, x):
        calls = []
        handle = nn.modules.module.register_module_forward_pre_hook(
            lambda module, args: calls.append(1) and None
        )
        step(model, x)
        handle.remove()
        return len(calls)

    return count


@pytest.fixture
def seconds():
    """`seconds(contexts, step)`: least thread-CPU seconds of a step in each context.

    Contexts take turns, so that a slow machine slows all of them. The order is shuffled, so that no
    context always runs after the same other one. Rounds are short and many and only the fastest
    step counts, so that other processes do not disturb. Existing objects are frozen, since
    collecting garbage between rounds would take longer than the steps.
    """

    def measure(contexts, step, *, rounds=80, steps=4):
        best = dict.fromkeys(contexts, float("inf"))
        order, shuffle = list(contexts), random.Random(0).shuffle
        gc.collect()
        gc.freeze()
        gc.disable()
        try:
            for _ in range(rounds):
                shuffle(order)
                for name in order:
                    with contexts[name]():
                        step()
                        for _ in range(steps):
                            start = time.thread_time_ns()
                            step()
                            took = time.thread_time_ns() - start
                            best[name] = min(best[name], took / 1e9)
                gc.collect()
        finally:
            gc.enable()
            gc.unfreeze()
        return best

    return measure
