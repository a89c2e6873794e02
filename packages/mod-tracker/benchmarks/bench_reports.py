"""How much longer does a training step take under each report, beside torch's FLOP counter?"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

from torch.utils.flop_counter import FlopCounterMode

from mod_tracker import profile_flops, profile_memory, profile_time, trace


def test_step_time_under_reports(model_and_input, seconds, capsys):
    """FLOPs: at most four times the plain step of the encoder."""
    model, x = model_and_input

    def step():
        model(x.clone().requires_grad_()).sum().backward()

    took = seconds(
        {
            "plain": nullcontext,
            "flops": profile_flops,
            "time": profile_time,
            "memory": profile_memory,
            "trace": trace,
            "torch's flops": partial(FlopCounterMode, display=False),
        },
        step,
        rounds=10,
        steps=3,
    )
    ratios = {name: s / took["plain"] for name, s in took.items()}
    with capsys.disabled():
        print(f"\n{type(model).__name__}; the encoder's flops must be 4x")
        print(", ".join(f"{name} {ratio:.2f}x" for name, ratio in ratios.items()))
