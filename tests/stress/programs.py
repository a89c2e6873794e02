"""Random differentiable programs in regions of sac-policies, compared with plain autograd.

A program is a few steps over a few values: operators, in-place operators, views, dropout,
normalisations, shared values, nested regions, hooks, caches, and state that is read and written.
In some programs a parameter or an input changes between forward and backward. The seed alone
determines the program.

    python -m stress.programs --seed 0 --count 2000

It counts the results:

    equal    gradients and state are bitwise those of plain autograd
    better   plain autograd refuses the change or is affected by it; the gradients are bitwise
             those of the program without the change
    refused  an error of the package, counted by its message
    both     plain autograd refuses, and so does the region, by an error of the package
    bare     another error, although plain autograd runs
    wrong    any other gradients

Exits with 1 if a result is bare or wrong, and prints the seeds. `--seed N --count 1` runs one seed.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import sac_policies as sp
from stress import state_steps
from stress.program_steps import (
    CHANGES,
    STEPS,
    Step,
    Values,
    World,
    cached,
    new_data,
    optimizer_step,
)

OPS = (
    *("aten.mm", "aten.sin", "aten.mul.Tensor", "aten.mul_", "aten.add_", "aten.relu_"),
    *("aten.bernoulli_", "aten.view", "aten.t", "aten.cat", "aten.exp", "aten._softmax"),
    *("aten.copy_", "aten.select", "aten.empty_like", "aten.div_", "aten.slice", "aten.fill_"),
    *("aten.addmm", "aten.silu", "aten.unsqueeze_", "aten.t_", "aten.native_layer_norm"),
    *("aten.convolution", "aten.bmm", "aten.embedding", "aten.as_strided_", "aten.masked_fill_"),
)


def policy_of(rng: random.Random) -> sp.Policy:
    """Choose a policy."""
    some = sp.save_ops(*rng.sample(OPS, rng.randrange(1, 8)))
    named = sp.save_named("n", missing_ok=True)
    return rng.choice(
        [
            *(some, ~some, sp.save_all(), sp.recompute_all(), sp.save_ops(sp.MATMULS)),
            *(named, some | named, some & ~named, sp.offload(some)),
            *(sp.save_by_bytes(at_most=200), sp.save_every_nth(*rng.sample(OPS, 3), n=2)),
        ]
    )


class Fresh(nn.Module):
    """A function wrapped so that its next region is a first step."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, t: torch.Tensor) -> torch.Tensor:
        return self.function(t)


def region(function: Step, y: torch.Tensor, world: World, rng: random.Random) -> torch.Tensor:
    """Run a step as a region or plainly."""
    policy = policy_of(rng)
    if not world.checkpoints:
        return function(y, world)

    def run(t: torch.Tensor) -> torch.Tensor:
        return function(t, world)

    chosen = Fresh(run) if rng.random() < 0.5 else run
    return sp.checkpoint(chosen, y, policy=policy, determinism_check="bits")


def cached_region(y: torch.Tensor, world: World, rng: random.Random) -> torch.Tensor:
    """Run a step with a cache, which it changes, as a region or plainly."""
    policy = policy_of(rng)
    if not world.checkpoints:
        return cached(y, world, world.cache)
    return sp.checkpoint(
        lambda t, cache: cached(t, world, cache),
        y,
        world.cache,
        policy=policy,
        determinism_check="bits",
    )


def program(seed: int, world: World, *, depth: int = 0) -> Step:
    """Make the program of a seed: steps, some of them regions."""

    def run(y: torch.Tensor, world: World) -> torch.Tensor:
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


def outcome(seed: int, checkpoints: bool, *, changes: bool = True) -> Any:
    """Return gradients and final state of the program of a seed, or its error."""
    world = World(seed, checkpoints)
    rng = random.Random(seed + 1)
    change = rng.choice(CHANGES) if rng.random() < 0.35 else None
    try:
        torch.manual_seed(seed + 2)
        first = program(seed, world)
        if change is new_data:  # plain code reads the new memory, and a region the old one
            out = region(first, world.given, world, random.Random(seed + 5))
        else:
            out = first(world.given, world)
        out = region(program(seed + 3, world), out, world, random.Random(seed + 4))
        drawn = torch.rand(1)
        loss = out.square().mean()
        if change is not None and changes:
            floats = [each for each in world.changeable if each.is_floating_point()]
            wanted = floats[rng.randrange(len(floats))]
            if change is not optimizer_step or (wanted.requires_grad and wanted.is_leaf):
                change(wanted)
        grads = torch.autograd.grad(loss, world.leaves, allow_unused=True)
    except Exception as error:
        return error
    return [loss.detach(), drawn, *grads], [each.detach().float().clone() for each in world.buffers]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.int32)


def same(one: Values, other: Values) -> bool:
    """Whether two lists of gradients are bit-identical."""
    return len(one) == len(other) and all(
        (a is None and b is None)
        or (a is not None and b is not None and torch.equal(_bits(a), _bits(b)))
        for a, b in zip(one, other, strict=True)
    )


def verdict(seed: int) -> tuple[str, str]:
    """Return the result of a seed's program in regions, and the error's message if any."""
    plain, found = outcome(seed, False), outcome(seed, True)
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
    unchanged = outcome(seed, False, changes=False)
    if not isinstance(unchanged, Exception) and same(unchanged[0], found[0]):
        return "better", ""
    return "wrong", "" if not isinstance(plain, Exception) else f"plain: {str(plain)[:80]}"


def main() -> int:
    """Run programs and print the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--count", type=int, default=200, help="programs to run")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    ends: Counter[str] = Counter()
    texts: Counter[str] = Counter()
    bad: list[str] = []
    for seed in range(asked.seed, asked.seed + asked.count):
        end, text = verdict(seed)
        ends[end] += 1
        if text:
            texts[f"{end}: {text}"] += 1
        if end in ("bare", "wrong"):
            bad.append(f"{end} at seed {seed} {text}")
    print(f"tried {asked.count},", dict(ends))
    for text, count in texts.most_common():
        print(f"  {count:5d} {text}")
    for line in bad[:40]:
        print(" ", line)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
