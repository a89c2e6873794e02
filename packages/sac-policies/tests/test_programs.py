"""Random programs under random policies: gradients are bitwise those of no checkpointing."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from sac_policies import (
    Policy,
    checkpoint,
    checkpoint_name,
    offload,
    recompute_all,
    save_all,
    save_by_bytes,
    save_every_nth,
    save_named,
    save_ops,
)

Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
OPS = (
    *("aten.mm", "aten.sin", "aten.mul.Tensor", "aten.mul_", "aten.add_", "aten.relu_"),
    *("aten.bernoulli_", "aten.view", "aten.t", "aten.cat", "aten.exp", "aten._softmax"),
    *("aten.copy_", "aten.select", "aten.empty_like", "aten.div_", "aten.slice", "aten.fill_"),
)


def _through_view(y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    z = y @ w
    z.view(-1).mul_(0.7)
    return z


def _into_row(y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    z = y @ w
    z[1].add_(0.3)
    z[0].copy_(y[2])
    return z


STEPS: tuple[Step, ...] = (
    _through_view,
    _into_row,
    lambda y, w: y @ w,
    lambda y, w: y.sin() * y,
    lambda y, w: (y @ w).relu_(),
    lambda y, w: F.dropout(y, 0.3),
    lambda y, w: y.t(),
    lambda y, w: torch.cat([y[2:], y[:2].sin()]),
    lambda y, w: y.sin().exp(),
    lambda y, w: y.softmax(-1),
    lambda y, w: checkpoint_name(y @ w, "n"),
    lambda y, w: y + y.mean(0, keepdim=True).expand(4, 4),
)


def _policy(rng: random.Random) -> Policy:
    some = save_ops(*rng.sample(OPS, rng.randrange(1, 6)))
    return rng.choice(
        [
            some,
            ~some,
            offload(some),
            save_all(),
            recompute_all(),
            save_by_bytes(at_most=60),
            save_every_nth(*rng.sample(OPS, 3), n=2),
            some | save_named("n", missing_ok=True),
        ]
    )


def _program(rng: random.Random, region: Callable[..., torch.Tensor], depth: int = 0) -> Step:
    """A few steps; some are regions of their own, by `region(function, y, policy)`."""
    steps: list[Step] = []
    for _ in range(rng.randrange(2, 7)):
        if depth < 2 and rng.random() < 0.25:
            inner, policy = _program(rng, region, depth + 1), _policy(rng)
            steps.append(lambda y, w, f=inner, p=policy: region(lambda u: f(u, w), y, p))
        else:
            steps.append(rng.choice(STEPS))

    def run(y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for step in steps:
            y = step(y, w)
        return y

    return run


@pytest.mark.filterwarnings("ignore::sac_policies.UnmatchedEntryWarning")
@pytest.mark.parametrize("seed", range(30))
def test_random_program_has_the_gradients_of_no_checkpointing(seed, gradients, equal):
    """In-place operators, views, dropout and regions in regions, in any order."""
    torch.manual_seed(seed)
    x, w = (torch.randn(4, 4, requires_grad=True) for _ in range(2))

    def region(function, y, policy):
        return checkpoint(function, y, policy=policy)

    def plainly(function, y, policy):
        return function(y)

    def kept(x, w):
        rng = random.Random(seed)
        policy = _policy(rng)
        return region(lambda u: _program(random.Random(seed), region)(u, w), x * w, policy)

    def plain(x, w):
        return _program(random.Random(seed), plainly)(x * w, w)

    assert equal(gradients(kept, x, w), gradients(plain, x, w))
