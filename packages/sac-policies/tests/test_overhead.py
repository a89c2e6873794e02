"""What the recipe engine costs in Python, counted: a clock would say what else the machine does."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import sac_policies
from sac_policies import MATMULS, Policy, profile, recompute_all, save_ops, solve
from sac_policies.engines.recipe._proof import proof_of

from ._recipe import leaf, run

OURS = str(Path(sac_policies.__file__).parent)


def _calls(function: Callable[[], Any]) -> int:
    """How many functions of the package are called, and generators of it resumed."""
    count = 0

    def seen(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(OURS)

    sys.setprofile(seen)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def test_proof_takes_few_calls() -> None:
    """There is one for each recipe, and one more when it is read."""
    assert _calls(lambda: proof_of(torch.ones(65536))) <= 3


WEIGHTS = [leaf(16, 16) for _ in range(4)]


def _block(x: torch.Tensor) -> torch.Tensor:
    """Norms by hand, rotated halves, products and gates; what their nodes read is at edges."""
    for w in WEIGHTS:
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        one, other = (y @ w).view(4, 4, 16).transpose(0, 1).chunk(2, -1)
        turned = torch.cat((-other, one), -1).transpose(0, 1).reshape(16, 16)
        x = x + F.silu(turned @ w) * y
    return x


@pytest.mark.parametrize(
    ("policy", "forward", "backward"), [(recompute_all(), 25, 13), (save_ops(MATMULS), 27, 7)]
)
def test_step_takes_few_calls_for_each_saved_tensor(
    policy: Policy, forward: int, backward: int
) -> None:
    """To decide on it and note its readers, then to rebuild it; the first two are noted."""
    x, saved = leaf(16, 16), []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda held: held):
        _block(x)
    run(_block, x, policy=policy)
    run(_block, x, policy=policy)
    outs: list[torch.Tensor] = []
    assert _calls(lambda: outs.append(run(_block, x, policy=policy))) <= forward * len(saved)
    assert _calls(lambda: outs.pop().sum().backward()) <= backward * len(saved)


SCALES = [leaf(16) for _ in range(2)]


def _gated(x: torch.Tensor) -> torch.Tensor:
    """What nodes saved is all that replays read."""
    for _ in range(3):
        y = F.layer_norm(x, (16,), *SCALES)
        x = x + (F.silu(y @ WEIGHTS[0]) * (y @ WEIGHTS[1])) @ WEIGHTS[2]
    return x


def test_forward_that_follows_takes_few_calls_for_each_saved_tensor() -> None:
    """The third is as the second; recipes for five of sixteen take most of the calls."""
    x, saved = leaf(16, 16), []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda held: held):
        _gated(x)
    policy = save_ops(MATMULS)
    for _ in range(2):
        run(_gated, x, policy=policy)
    outs: list[torch.Tensor] = []
    forward = _calls(lambda: outs.append(run(_gated, x, policy=policy)))
    backward = _calls(lambda: outs.pop().sum().backward())
    assert forward <= 4.5 * len(saved)
    assert backward <= 4 * len(saved)


@pytest.mark.parametrize(
    ("function", "sees", "follows", "decides"),
    [
        (_block, True, 11.5, 25),
        (_gated, True, 11.5, 18),
        (_block, False, 8, 23),
        (_gated, False, 8, 14),
    ],
)
def test_plan_is_followed_at_few_calls_for_each_saved_tensor(
    function: Callable[[torch.Tensor], torch.Tensor], sees: bool, follows: float, decides: float
) -> None:
    """Where calls are seen, by a forward that decides as well, that is the most of it."""
    x, saved = leaf(16, 16), []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda held: held):
        function(x)
    noted = profile(function, x)
    # What a plan keeps is not to depend on what else the machine does.
    noted = replace(noted, ops=tuple(replace(op, cost=op.out_bytes) for op in noted.ops))
    trace = replace(noted, unseen=None) if sees else noted.without_calls
    assert trace is not None
    plan = solve(trace, (trace.fixed_bytes() + trace.total_bytes()) // 2)
    again = replace(plan)
    for _ in range(2):
        run(function, x, policy=plan)
    outs: list[torch.Tensor] = []
    one = _calls(lambda: outs.append(run(function, x, policy=plan)))
    other = _calls(lambda: outs.append(run(function, x, policy=again)))
    assert one <= follows * len(saved)
    assert other >= decides * len(saved)


WIDE = [leaf(64) for _ in range(2)]


def _normed(x: torch.Tensor) -> torch.Tensor:
    """What is saved most is made again by calls: statistics."""
    for _ in range(4):
        x = x + F.layer_norm(x, (64,), *WIDE).sin()
    return x


def test_calls_that_are_made_again_are_followed_at_few_calls() -> None:
    """A norm that is seen, and its two results, take the most of 27 calls for a saved tensor."""
    x, saved = leaf(512, 64), []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda held: held):
        _normed(x)
    for _ in range(3):
        run(_normed, x)
    outs: list[torch.Tensor] = []
    assert _calls(lambda: outs.append(run(_normed, x))) <= 28 * len(saved)
    assert _calls(lambda: outs.pop().sum().backward()) <= 16 * len(saved)


def test_region_takes_few_calls_whatever_is_in_it() -> None:
    """What a policy says is worked out once."""
    x = leaf(4, 4)
    run(torch.neg, x)
    run(torch.neg, x)
    assert _calls(lambda: run(torch.neg, x)) <= 23
