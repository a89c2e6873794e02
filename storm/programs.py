"""Random differentiable programs under every engine of sac-policies, against plain autograd.

One program is a few steps over a few values: operators, in-place operators, views, dropout,
normalisations, shared values, regions inside regions, hooks, caches, state that is read and
written to. Some are followed by a
change of a parameter or an input between forward and backward. Which program it is depends on its
seed alone.

    python -m storm.programs --seed 0 --count 2000

For each engine it counts how the programs ended:

    equal    gradients and state are bitwise those of plain autograd
    better   plain autograd refuses the change or is changed by it; the gradients are bitwise
             those of the program without the change
    refused  an error of the package, counted by its message
    both     plain autograd refuses, and so does the engine, by an error of the package
    bare     an error that is not the package's, where plain autograd runs
    wrong    any other gradients

Exits with 1 where something is bare or wrong, and prints the seeds, each of which runs alone with
`--seed N --count 1`.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import sac_policies as sp
from storm import state_steps
from storm.state_steps import State

ENGINES = ("recipe", "contexts", "auto")
SIZE = 6
Values = list[torch.Tensor]


@dataclass
class World:
    """What a program is run on, made afresh for each run: parameters, an input, a cache."""

    seed: int
    engine: str | None = None
    cache: dict[str, Any] = field(default_factory=dict)
    kept: Values = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        rng = random.Random(self.seed)
        wide = rng.random() < 0.2
        self.size = size = 96 if wide else SIZE
        self.x = torch.randn(size, size, requires_grad=True)
        self.w = torch.randn(size, size).mul_(size**-0.5).requires_grad_()
        self.linear = nn.Linear(size, size)
        self.norms = nn.ModuleList([nn.LayerNorm(size), nn.RMSNorm(size), nn.GroupNorm(2, size)])
        self.conv = nn.Conv1d(size, size, 3, padding=1)
        self.batch = nn.BatchNorm1d(size).train(rng.random() < 0.5)
        self.table = nn.Embedding(size, size)
        self.modules = nn.ModuleList([self.linear, self.norms, self.conv, self.batch, self.table])
        self.scale = torch.full((size,), 1.25)
        self.state = State(size)
        # Values with a history: what the program is given, and what it finds.
        self.given, self.found = self.x * 1.0, self.w.sin()

    @property
    def leaves(self) -> Values:
        """What gradients are taken of."""
        return [self.x, self.w, *self.modules.parameters()]

    @property
    def changeable(self) -> Values:
        """What may be changed between forward and backward."""
        return [*self.leaves, self.scale, *self.buffers, self.given, self.found]

    @property
    def buffers(self) -> Values:
        """What programs write to."""
        return [*self.modules.buffers(), *self.state.tensors]


def _rows(y: torch.Tensor, world: World) -> torch.Tensor:
    return torch.arange(y.shape[0]) % world.size


def _into_row(y: torch.Tensor, w: World) -> torch.Tensor:
    z = y @ w.w
    z[1].add_(0.3)
    z[0].copy_(y[2])
    return z


def _through_view(y: torch.Tensor, w: World) -> torch.Tensor:
    z = y @ w.w
    z.view(-1).mul_(0.7)
    return z


def _masked(y: torch.Tensor, w: World) -> torch.Tensor:
    z = y * 1.5
    z.masked_fill_(y.detach() > 0.4, 0.1)
    return z


def _reshaped(y: torch.Tensor, w: World) -> torch.Tensor:
    z = F.silu(y @ w.w)
    z.unsqueeze_(0).transpose_(1, 2)
    return z.squeeze_(0).t_().sin()


def _strided(y: torch.Tensor, w: World) -> torch.Tensor:
    z = y * 2
    z.as_strided_(tuple(y.shape), (1, y.shape[0]))
    return z.cos()


def _hooked(y: torch.Tensor, w: World) -> torch.Tensor:
    if y.requires_grad:
        y.register_hook(lambda g: g * 1.5)
    w.w.register_hook(lambda g: g * 0.5)
    return y @ w.w


def _cached(y: torch.Tensor, w: World, cache: dict[str, Any] | None = None) -> torch.Tensor:
    held = w.cache if cache is None else cache
    held.setdefault("keys", []).append(y @ w.w)
    return sum(held["keys"][-2:]) * len(held["keys"])  # type: ignore[return-value]


def _heads(y: torch.Tensor, w: World) -> torch.Tensor:
    q, k, v = (each.reshape(1, 2, -1, 3).contiguous() for each in (y, y.sin(), y @ w.w))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).reshape(y.shape)


def _inner_gradient(y: torch.Tensor, w: World) -> torch.Tensor:
    z = y.detach().requires_grad_()
    (g,) = torch.autograd.grad((z @ w.w.detach()).sin().sum(), z)
    return y + g


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(y)
        return y * y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (y,) = ctx.saved_tensors
        return 2 * y * grads[0]


def _rotated(y: torch.Tensor, w: World) -> torch.Tensor:
    left, right = y[:, : y.shape[1] // 2], y[:, y.shape[1] // 2 :]
    return torch.cat([-right, left], -1) * w.scale + y


def _residual(y: torch.Tensor, w: World) -> torch.Tensor:
    z = y + w.linear(y)
    return z + (w.norms[0](z) @ w.w).relu_() - z.mean(-1, keepdim=True)


Step = Callable[[torch.Tensor, World], torch.Tensor]
STEPS: tuple[Step, ...] = (
    _into_row,
    _through_view,
    _masked,
    _reshaped,
    _strided,
    _hooked,
    _heads,
    _inner_gradient,
    lambda y, w: _Square.apply(y),
    lambda y, w: y @ w.w,
    lambda y, w: y @ w.w.t(),
    lambda y, w: w.linear(y),
    lambda y, w: F.silu(w.linear(y)) * y,
    lambda y, w: w.norms[0](y),
    lambda y, w: F.gelu(w.norms[1](y)),
    lambda y, w: w.norms[2](y.view(y.shape[0], y.shape[1], 1)).view(y.shape),
    lambda y, w: w.conv(y.unsqueeze(0)).squeeze(0),
    lambda y, w: w.batch(y),
    lambda y, w: w.table(_rows(y, w)) * y,
    lambda y, w: y * w.scale,
    lambda y, w: y * w.found,
    lambda y, w: (y @ w.found.t()).cos(),
    lambda y, w: y.sin() * y,
    lambda y, w: (y @ w.w).relu_(),
    lambda y, w: F.leaky_relu(y, 0.2) / 1.5,
    lambda y, w: F.dropout(y, 0.3),
    lambda y, w: F.dropout(y * 1.0, 0.3, inplace=True),
    lambda y, w: y.t(),
    lambda y, w: torch.cat([y[2:], y[:2].sin()]),
    lambda y, w: torch.cat(F.glu(torch.cat([y, y.cos()], -1), -1).chunk(2, -1), -1),
    lambda y, w: y.tanh().exp(),
    lambda y, w: y.softmax(-1),
    lambda y, w: F.softplus(y).sqrt(),
    lambda y, w: y.pow(2) * 0.1,
    lambda y, w: sp.name(y @ w.w, "n"),
    lambda y, w: y + y.mean(0, keepdim=True).expand_as(y),
    lambda y, w: torch.stack(y.unbind(0)[::-1]),
    lambda y, w: torch.where(y > 0, y, y.abs().sin()),
    _rotated,
    _residual,
    lambda y, w: (y + y.sin()).sigmoid() - y,
    lambda y, w: (y * 0.5).log_softmax(0) @ w.w,
    lambda y, w: (y @ w.w).t().contiguous().t() + y,
    lambda y, w: (y.t().clone() * 2.0).t().cos(),
    lambda y, w: (y - y.max(-1, keepdim=True)[0]).exp(),
    lambda y, w: (y.topk(y.shape[1])[0] + y).cos(),
    lambda y, w: (y[_rows(y, w).flip(0)] + y).sin(),
    lambda y, w: (1.0 + y.tanh()) * y,
    lambda y, w: (y.double() * w.scale).float().sin(),
    lambda y, w: (y.cumsum(0) / 3.0 + y).tanh(),
    lambda y, w: torch.baddbmm(y[None], y[None], w.w[None])[0],
)
OPS = (
    *("aten.mm", "aten.sin", "aten.mul.Tensor", "aten.mul_", "aten.add_", "aten.relu_"),
    *("aten.bernoulli_", "aten.view", "aten.t", "aten.cat", "aten.exp", "aten._softmax"),
    *("aten.copy_", "aten.select", "aten.empty_like", "aten.div_", "aten.slice", "aten.fill_"),
    *("aten.addmm", "aten.silu", "aten.unsqueeze_", "aten.t_", "aten.native_layer_norm"),
    *("aten.convolution", "aten.bmm", "aten.embedding", "aten.as_strided_", "aten.masked_fill_"),
)


def policy_of(rng: random.Random, engine: str | None) -> sp.Policy:
    """Choose a policy; for the recipe engine one that it can follow."""
    some = sp.save_ops(*rng.sample(OPS, rng.randrange(1, 8)))
    followed = [some, ~some, sp.save_all(), sp.recompute_all(), sp.save_ops(sp.MATMULS)]
    others = [
        sp.offload(some),
        sp.save_by_bytes(at_most=200),
        sp.save_every_nth(*rng.sample(OPS, 3), n=2),
        some | sp.save_named("n", missing_ok=True),
    ]
    at = rng.randrange(len(followed) + len(others))
    return (followed + others)[at % len(followed) if engine == "recipe" else at]


class Fresh(nn.Module):
    """A function that no engine has seen before."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, t: torch.Tensor) -> torch.Tensor:
        """Call it."""
        return self.function(t)


def region(function: Step, y: torch.Tensor, world: World, rng: random.Random) -> torch.Tensor:
    """Run a step as a region of the world's engine, or plainly."""
    policy, early_stop = policy_of(rng, world.engine), rng.random() < 0.7
    if world.engine is None:
        return function(y, world)

    def run(t: torch.Tensor) -> torch.Tensor:
        return function(t, world)

    return sp.checkpoint(
        Fresh(run) if rng.random() < 0.5 else run,
        y,
        policy=policy,
        engine=world.engine,
        early_stop=early_stop,
    )


def cached_region(y: torch.Tensor, world: World, rng: random.Random) -> torch.Tensor:
    """Do the same for a step that is given a cache, which it changes."""
    policy = policy_of(rng, world.engine)
    if world.engine is None:
        return _cached(y, world, world.cache)
    return sp.checkpoint(
        lambda t, cache: _cached(t, world, cache),
        y,
        world.cache,
        policy=policy,
        engine=world.engine,
    )


def program(seed: int, world: World, *, depth: int = 0) -> Step:
    """Make the program of a seed: steps, some of them regions of their own."""

    def run(y: torch.Tensor, world: World) -> torch.Tensor:
        # Each run draws the same steps, also one that begins in the middle of another: a
        # gradient inside a region recomputes what of the region ran before it.
        rng = random.Random(seed)
        shared = y
        for at in range(rng.randrange(2, 8)):
            kind = rng.random()
            if depth < 2 and kind < 0.3:
                inner = program(rng.randrange(2**30), world, depth=depth + 1)
                y = region(inner, y, world, random.Random(rng.randrange(2**30)))
            elif kind < 0.34 and depth == 0:
                y = cached_region(y, world, random.Random(rng.randrange(2**30)))
            elif kind < 0.42:
                y = y * 0.5 + shared
            else:
                step = rng.randrange(len(STEPS) + len(state_steps.STEPS))
                if step < len(STEPS):
                    y = STEPS[step](y, world)
                else:
                    y = state_steps.STEPS[step - len(STEPS)](y, world.state)
            if at == 1:
                shared = y
        return y

    return run


def _add_unseen(t: torch.Tensor) -> None:
    t.data.add_(0.25)


def _negate_unseen(t: torch.Tensor) -> None:
    t.data.neg_()


def _new_data(t: torch.Tensor) -> None:
    t.data = t.data * 0.5


def _in_place(t: torch.Tensor) -> None:
    with torch.no_grad():
        t.mul_(0.5)


def _copied(t: torch.Tensor) -> None:
    with torch.no_grad():
        t.copy_(torch.ones_like(t))


def _step(t: torch.Tensor) -> None:
    t.grad = torch.ones_like(t)
    torch.optim.SGD([t], lr=0.1).step()
    t.grad = None


def _swap(t: torch.Tensor) -> None:
    with torch.no_grad():
        t.set_(t.detach().clone() * 2)


CHANGES = (_add_unseen, _negate_unseen, _new_data, _in_place, _copied, _step, _swap)


def outcome(seed: int, engine: str | None, *, changes: bool = True) -> Any:
    """Gradients of the program of a seed, and its state after it, or the error it raised."""
    world = World(seed, engine)
    rng = random.Random(seed + 1)
    change = rng.choice(CHANGES) if rng.random() < 0.35 else None
    try:
        torch.manual_seed(seed + 2)
        out = program(seed, world)(world.given, world)
        out = region(program(seed + 3, world), out, world, random.Random(seed + 4))
        drawn = torch.rand(1)
        loss = out.square().mean()
        if change is not None and changes:
            floats = [each for each in world.changeable if each.is_floating_point()]
            wanted = floats[rng.randrange(len(floats))]
            if change is not _step or (wanted.requires_grad and wanted.is_leaf):
                change(wanted)
        grads = torch.autograd.grad(loss, world.leaves, allow_unused=True)
    except Exception as error:
        return error
    return [loss.detach(), drawn, *grads], [each.detach().float().clone() for each in world.buffers]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.int32)


def same(one: Values, other: Values) -> bool:
    """Whether two lists of gradients are equal bit by bit."""
    return len(one) == len(other) and all(
        (a is None and b is None)
        or (a is not None and b is not None and torch.equal(_bits(a), _bits(b)))
        for a, b in zip(one, other, strict=True)
    )


def verdict(seed: int, engine: str) -> tuple[str, str]:
    """How the program of a seed ends under an engine, and the error's message where there is."""
    plain, found = outcome(seed, None), outcome(seed, engine)
    if isinstance(found, Exception):
        told = re.sub(r"\d+|\([^()]*\)|at \S+ in \S+|[\w.]+Backward0", "_", str(found))[:110]
        text = f"{type(found).__name__}: {told}"
        if isinstance(found, sp.SacError):
            return ("both" if isinstance(plain, Exception) else "refused"), text
        bare = not isinstance(plain, Exception) or str(plain) != str(found)
        return ("bare" if bare else "both"), text
    if not isinstance(plain, Exception):
        if not same(plain[1], found[1]):
            return "wrong", "state"
        if same(plain[0], found[0]):
            return "equal", ""
    unchanged = outcome(seed, None, changes=False)
    if not isinstance(unchanged, Exception) and same(unchanged[0], found[0]):
        return "better", ""
    return "wrong", "" if not isinstance(plain, Exception) else f"plain: {str(plain)[:80]}"


def main() -> int:
    """Run programs and print how they ended."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--count", type=int, default=200, help="programs for each engine")
    parser.add_argument("--engine", choices=ENGINES, action="append", help="default: every one")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    failed = False
    for engine in asked.engine or ENGINES:
        ends: Counter[str] = Counter()
        texts: Counter[str] = Counter()
        bad: list[str] = []
        for seed in range(asked.seed, asked.seed + asked.count):
            end, text = verdict(seed, engine)
            ends[end] += 1
            if text:
                texts[f"{end}: {text}"] += 1
            if end in ("bare", "wrong"):
                bad.append(f"{end} at seed {seed} {text}")
        print(f"{engine}: tried {asked.count},", dict(ends))
        for text, count in texts.most_common():
            print(f"  {count:5d} {text}")
        for line in bad[:40]:
            print(" ", line)
        failed = failed or bool(bad)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
