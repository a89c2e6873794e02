"""How much faster are step, clip, zero_grad and EMA over chunks than over 300 parameters?

Each benchmark times torch's ways and ours in rounds that take turns, checks that the results
agree, and records the ratio beside the time.

    pytest packages/flat-param/benchmarks/bench_step.py
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import flat_param

sys.path.insert(0, str(Path(__file__).parent))
from _clock import side_by_side
from _models import SIZES, many_parameters

torch.set_num_threads(1)


@pytest.fixture(params=SIZES, ids=str)
def sides(request):
    """The same parameters and gradients, plain and flat."""
    plain = many_parameters(SIZES[request.param])
    live = copy.deepcopy(plain)
    flat = flat_param.flatten(live)
    for mine, theirs in zip(live.parameters(), plain.parameters(), strict=True):
        theirs.grad = torch.randn_like(theirs) * 1e-3
        mine.grad = theirs.grad.clone()
    flat.grad_vector()
    return request.param, list(plain.parameters()), flat


def _report(benchmark, size, ours, theirs, must):
    """Record the ratio; the benchmark's own time is that of our side alone."""
    ratio = min(theirs.values()) / ours
    benchmark.extra_info |= {"size": size, "ours_us": ours, **theirs, "ratio": ratio, "must": must}
    sys.stderr.write(f"\n{benchmark.name}: {ratio:.2f}x, must {must}x; ours {ours:.0f} us\n")


def _adamw(params, **mode):
    return torch.optim.AdamW(params, lr=1e-6, **mode)


MODES = {"fused": {"fused": True}, "foreach": {"foreach": True}, "loop": {"foreach": False}}


@pytest.mark.parametrize("mode", MODES)
def test_adamw(benchmark, sides, mode):
    """Fused AdamW over chunks of 256 Ki elements, against each of torch's three modes."""
    size, params, flat = sides
    ours = _adamw(flat.chunks(), fused=True)
    theirs = _adamw(params, **MODES[mode])
    times = side_by_side({"ours": ours.step, mode: theirs.step}, rounds=20)
    must = {"0.16M": 10, "2.5M": 1.9, "9.9M": 1.2}[size] if mode == "fused" else 1
    _report(benchmark, size, times["ours"], {mode: times[mode]}, must)
    benchmark.pedantic(ours.step, rounds=3)


def _limits(norm, shrink):
    """Above the norm; or below it and falling, so that each clip has something to shrink."""
    while True:
        norm *= 0.999 if shrink else 1.0
        yield norm if shrink else 1e9


@pytest.mark.parametrize("shrink", [False, True], ids=["below the limit", "above it"])
def test_clip(benchmark, sides, shrink):
    """Norm of all gradients, and scaling where it is too large."""
    size, params, flat = sides
    norm = float(flat.grad_norm())
    torch.testing.assert_close(nn.utils.clip_grad_norm_(params, 1e9), flat.clip_(1e9))
    limits = {side: _limits(norm, shrink) for side in ("torch", "ours")}
    steps = {
        "torch": lambda: nn.utils.clip_grad_norm_(params, next(limits["torch"])),
        "ours": lambda: flat.clip_(next(limits["ours"])),
    }
    times = side_by_side(steps)
    must = {"0.16M": 10, "2.5M": 3, "9.9M": 1.2}[size]
    _report(benchmark, size, times["ours"], {"torch": times["torch"]}, must)
    benchmark.pedantic(steps["ours"], rounds=3)


def test_zero_grad(benchmark, sides):
    """One fill against one per parameter."""
    size, params, flat = sides
    optimizer = torch.optim.SGD(params, lr=0.0)
    steps = {"torch": lambda: optimizer.zero_grad(set_to_none=False), "ours": flat.zero_grad}
    times = side_by_side(steps)
    must = {"0.16M": 10, "2.5M": 2.5, "9.9M": 1.3}[size]
    _report(benchmark, size, times["ours"], {"torch": times["torch"]}, must)
    benchmark.pedantic(flat.zero_grad, rounds=3)


def test_ema(benchmark, sides):
    """One interpolation against `torch._foreach_lerp_` over parameters."""
    size, params, flat = sides
    average = flat_param.flat_params_of(copy.deepcopy(flat.module))
    shadows = [param.detach().clone() for param in params]
    live = [param.detach() for param in params]
    steps = {
        "foreach": lambda: torch._foreach_lerp_(shadows, live, 0.01),
        "ours": lambda: average.lerp_(flat, 0.01),
    }
    times = side_by_side(steps)
    must = {"0.16M": 6, "2.5M": 2, "9.9M": 1.1}[size]
    _report(benchmark, size, times["ours"], {"foreach": times["foreach"]}, must)
    benchmark.pedantic(steps["ours"], rounds=3)
