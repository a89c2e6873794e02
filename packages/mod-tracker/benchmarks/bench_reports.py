"""How much longer does a training step take under each report, beside torch's own tools?

Steps that a report looks at operator by operator come first and more and more seldom, so the first
step and a later one are told apart, and the mean is over as many steps as are run.
"""

from __future__ import annotations

import gc
import random
import time
from contextlib import nullcontext
from functools import partial
from statistics import mean, median

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from mod_tracker import profile_flops, profile_memory, profile_time, trace, watch_memory

CONTEXTS = {
    "plain": nullcontext,
    "time": profile_time,
    "trace": trace,
    "flops": profile_flops,
    "memory": profile_memory,
    "watch_memory": watch_memory,
    "memory, every step": partial(profile_memory, every_step=True),
    "torch's profiler": partial(profile, activities=[ProfilerActivity.CPU], acc_events=True),
    "torch's flops": partial(FlopCounterMode, display=False),
}
MUST = {
    32: {"time": 1.3, "trace": 1.5, "flops": 1.5, "memory": 2.0},
    256: {"time": 1.05, "trace": 1.05, "flops": 1.05, "memory": 1.05, "watch_memory": 1.05},
}
SETTLED = 8
"""Steps after which the next one alike that is looked at is far away."""


def encoder(width, batch, tokens, hidden):
    """Six encoder layers in training mode, where none of them is one fused kernel."""
    layer = nn.TransformerEncoderLayer(width, 2, hidden, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
    return model, torch.randn(batch, tokens, width)


@pytest.mark.parametrize(
    ("width", "batch", "tokens", "hidden", "rounds"), [(32, 1, 8, 64, 8), (256, 8, 64, 1024, 3)]
)
def test_step_time_under_reports(width, batch, tokens, hidden, rounds, capsys):
    """Seconds of thread-CPU time; contexts take turns in a shuffled order."""
    model, x = encoder(width, batch, tokens, hidden)
    took = {name: [] for name in CONTEXTS}
    order = list(CONTEXTS)

    def step():
        start = time.thread_time_ns()
        model(x.clone().requires_grad_()).sum().backward()
        return time.thread_time_ns() - start

    step()
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            random.Random(len(took["plain"])).shuffle(order)
            for name in order:
                with CONTEXTS[name]():
                    took[name].append([step() for _ in range(SETTLED + 7)])
            gc.collect()
    finally:
        gc.enable()
    plain = median(t for turn in took["plain"] for t in turn)
    with capsys.disabled():
        print(f"\nwidth {width}: plain {plain / 1e6:.2f} ms; times as long")
        print(f"{'':22}{'first':>8}{'later':>8}{'mean':>8}{'must':>8}")
        for name, turns in took.items():
            first = median(turn[0] for turn in turns) / plain
            later = median(t for turn in turns for t in turn[SETTLED:]) / plain
            every = mean(t for turn in turns for t in turn) / plain
            must = MUST[width].get(name, "")
            print(f"{name:22}{first:8.2f}{later:8.2f}{every:8.2f}{must:>8}")
