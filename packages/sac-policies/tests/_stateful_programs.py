"""Random training programs whose models have state, hooks, generators of their own, and threads.

A program is a model of a few stages, each a region, and some steps of one or more micro-batches.
Stages are made of parts: counters, buffers that are written always, sometimes or between forward
and backward, batch norm, caches, hooks, noise, layers that are left out by chance.
`outcome(seed, None)` trains plainly, `outcome(seed, "matmuls")` in regions of the tape engine; both
return gradients and all state that is left. Run this file to compare many:
`python -m tests._stateful_programs FIRST COUNT`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils._pytree import tree_leaves

from sac_policies import checkpoint

from . import _programs
from ._programs import MODES, Expected
from ._tape_programs import policy_of

SIZE = 6
Part = Callable[["Stage", Tensor], Tensor]


@dataclass
class Log:
    """What hooks and parts noted, compared at the end."""

    events: list[tuple[str, float]] = field(default_factory=list)

    def note(self, what: str, tensor: Tensor | None = None) -> None:
        """Note an event with a number; NaN would not equal itself."""
        number = 0.0 if tensor is None else float(tensor.detach().double().sum().nan_to_num())
        self.events.append((what, number))


class Stage(nn.Module):
    """Parts in a row.

    Attributes:
        calls: number of calls, which parts read.
        scale: a number that the training loop anneals between forward and backward.
        last: a tensor of the previous call.
        cache: tensors of earlier calls.
        own: a generator.
        log: gets events of hooks.
        uses_global: whether parts may draw from generators of the process.
    """

    def __init__(self, choose: random.Random, log: Log, uses_global: bool) -> None:
        super().__init__()
        self.calls, self.scale, self.log, self.uses_global = 0, 1.0, log, uses_global
        self.last: Tensor | None = None
        self.cache: dict[str, Any] = {"seen": []}
        self.linear, self.gate = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE, bias=False)
        self.norm = nn.BatchNorm1d(SIZE, momentum=choose.choice([0.1, None]))
        self.rnn = nn.LSTM(SIZE, SIZE)
        self.spectral = parametrizations.spectral_norm(nn.Linear(SIZE, SIZE))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", torch.linspace(0.5, 1, SIZE))
        self.register_buffer("shift", torch.linspace(-1, 1, SIZE))
        self.own = torch.Generator().manual_seed(choose.randrange(1000))
        self.python = random.Random(choose.randrange(1000))
        self.numbers = numpy.random.RandomState(choose.randrange(1000))
        kinds = [each for each in PARTS if uses_global or each not in GLOBAL]
        self.parts: list[Part] = [choose.choice(kinds) for _ in range(choose.randrange(2, 6))]

    def forward(self, x: Tensor) -> Tensor:
        """Apply the parts."""
        self.calls += 1
        for part in self.parts:
            x = part(self, x)
        return x


PARTS: list[Part] = []
GLOBAL: list[Part] = []


def part(function: Part) -> Part:
    """Register a part."""
    PARTS.append(function)
    return function


def global_part(function: Part) -> Part:
    """Register a part that draws from generators of the process."""
    GLOBAL.append(function)
    return part(function)


@part
def linear(stage: Stage, x: Tensor) -> Tensor:
    """Multiply by a weight."""
    return stage.linear(x).sin()


@part
def gated(stage: Stage, x: Tensor) -> Tensor:
    """Multiply with a gate."""
    return F.silu(stage.gate(x)) * x


@part
def counted(stage: Stage, x: Tensor) -> Tensor:
    """Scale by the number of calls."""
    return (x * (1 + 0.1 * stage.calls)).tanh()


@part
def annealed(stage: Stage, x: Tensor) -> Tensor:
    """Scale by a number that the loop changes."""
    return (x * stage.scale).cos()


@part
def counter_buffer(stage: Stage, x: Tensor) -> Tensor:
    """Count calls in a buffer, and read it."""
    stage.count += 1
    return (x + 0.01 * stage.count).sin()


@part
def averaged(stage: Stage, x: Tensor) -> Tensor:
    """Write an average in training, then divide by it."""
    if stage.training:
        with torch.no_grad():
            stage.average.mul_(0.9).add_(x.abs().mean(0), alpha=0.1)
    return (x / (stage.average.clone() + 1)).tanh()


@part
def averaged_after(stage: Stage, x: Tensor) -> Tensor:
    """Read an average, then write it every second call."""
    out = (x + stage.average).sin()
    if stage.calls % 2:
        stage.average.lerp_(x.detach().mean(0), 0.2)
    return out


@part
def replaced(stage: Stage, x: Tensor) -> Tensor:
    """Replace a buffer by a new tensor."""
    stage.average = stage.average * 0.9 + x.detach().mean(0) * 0.1
    return (x - stage.average).cos()


@part
def shifted(stage: Stage, x: Tensor) -> Tensor:
    """Add a buffer that the loop writes to between forward and backward."""
    return (x + stage.shift).sin()


@part
def normed(stage: Stage, x: Tensor) -> Tensor:
    """Normalise a batch."""
    return stage.norm(x).tanh()


@part
def spectral(stage: Stage, x: Tensor) -> Tensor:
    """Divide a weight by its norm, whose vectors each call in training writes."""
    return stage.spectral(x).sin()


@part
def recurrent(stage: Stage, x: Tensor) -> Tensor:
    """Run a fused LSTM over rows."""
    return stage.rnn(x[:, None])[0][:, 0] + x


@part
def remembered(stage: Stage, x: Tensor) -> Tensor:
    """Add a tensor of the previous call."""
    before, stage.last = stage.last, x.detach()
    return x.sin() if before is None else (x + 0.1 * before).cos()


@part
def cached(stage: Stage, x: Tensor) -> Tensor:
    """Append to a cache, and read all of it."""
    seen = stage.cache["seen"]
    seen.append(x.detach().mean(0))
    stage.cache["keys"] = torch.cat([stage.cache.get("keys", x.detach()[:0]), x.detach()[:1]])
    return (x @ torch.stack(seen[-3:]).mean(0).diag() + stage.cache["keys"].mean()).tanh()


@part
def noisy(stage: Stage, x: Tensor) -> Tensor:
    """Add noise of generators of its own."""
    noise = torch.randn(x.shape, generator=stage.own) * stage.python.random()
    return (x + noise * float(stage.numbers.rand())).sin()


@part
def masked(stage: Stage, x: Tensor) -> Tensor:
    """Drop elements by a generator of its own."""
    return x * torch.empty_like(x).bernoulli_(0.8, generator=stage.own)


@part
def routed(stage: Stage, x: Tensor) -> Tensor:
    """Choose two columns by noisy scores."""
    scores = stage.gate(x) + torch.rand(x.shape, generator=stage.own)
    weights, places = scores.softmax(-1).topk(2, -1)
    return (x.gather(1, places) * weights).sum(-1, keepdim=True) * x


@part
def left_out(stage: Stage, x: Tensor) -> Tensor:
    """Leave a layer out by chance, in training."""
    if stage.training and stage.python.random() < 0.4:
        return x
    return stage.linear(x).cos()


@part
def hooked_tensor(stage: Stage, x: Tensor) -> Tensor:
    """Hook a gradient: note it and scale it."""
    y = x * 1.5
    log = stage.log
    if y.requires_grad:
        y.register_hook(lambda grad: (log.note("tensor", grad), grad * 0.9)[1])
    return y.sin()


@part
def in_place(stage: Stage, x: Tensor) -> Tensor:
    """Write to an activation."""
    y = x + 1
    y.mul_(0.5).relu_()
    y[0] = 0.1
    return y.exp()


@part
def without_gradients(stage: Stage, x: Tensor) -> Tensor:
    """Compute a target without gradients, under modes that are left again."""
    with torch.no_grad():
        target = stage.linear(x).softmax(-1)
    with torch.autocast("cpu", torch.bfloat16):
        y = stage.gate(x).float()
    return y * target + x


@part
def differentiated(stage: Stage, x: Tensor) -> Tensor:
    """Differentiate inside the forward."""
    z = x.detach().requires_grad_()
    (grad,) = torch.autograd.grad(stage.gate(z).sin().sum(), z)
    return x + grad


@global_part
def dropped(stage: Stage, x: Tensor) -> Tensor:
    """Drop elements."""
    return F.dropout(x, 0.3, stage.training)


@global_part
def drawn(stage: Stage, x: Tensor) -> Tensor:
    """Draw from the generators of torch, Python and NumPy."""
    return (x + torch.randn_like(x) * random.random() * float(numpy.random.rand())).sin()


class Model(nn.Module):
    """Stages, of which one may be called twice; hooks on some of them.

    Args:
        seed: the program.
        mode: policies; None for a plain model.
    """

    def __init__(self, seed: int, mode: str | None, uses_global: bool) -> None:
        super().__init__()
        choose = random.Random(seed)
        self.log, self.mode = Log(), mode
        count = choose.randrange(1, 4)
        self.stages = nn.ModuleList(Stage(choose, self.log, uses_global) for _ in range(count))
        self.order = [*range(count), *choose.choices(range(count), k=choose.randrange(2))]
        self.policies = [choose.randrange(1 << 30) for _ in self.order]
        self.is_nested = choose.random() < 0.2
        for stage in self.stages:
            if choose.random() < 0.5:
                _add_hooks(stage, self.log, choose.randrange(5))

    def forward(self, x: Tensor) -> Tensor:
        """Run the stages, each in a region."""
        return self._region(self._all, x, self.policies[0]) if self.is_nested else self._all(x)

    def _all(self, x: Tensor) -> Tensor:
        for at, policy in zip(self.order, self.policies, strict=True):
            x = self._region(self.stages[at], x, policy)
        return x

    def _region(self, function: Any, x: Tensor, policy: int) -> Tensor:
        if self.mode is None:
            return function(x)
        return checkpoint(function, x, policy=policy_of(policy, self.mode))


def _add_hooks(stage: Stage, log: Log, kind: int) -> None:
    if kind == 0:
        stage.register_forward_pre_hook(
            lambda m, args: (log.note("pre", args[0]), (args[0] * 0.9,))[1]
        )
    elif kind == 1:
        stage.register_forward_hook(lambda m, args, out: (log.note("forward", out), out * 1.1)[1])
    elif kind == 2:
        stage.register_full_backward_hook(lambda m, grads, outs: log.note("backward", outs[0]))
    elif kind == 3:
        stage.linear.register_forward_hook(lambda m, args, out: log.note("inner", out))
    else:
        for each in stage.linear.parameters():
            each.register_post_accumulate_grad_hook(lambda p: log.note("accumulated", p.grad))


CHANGES = ("anneal", "shift", "count", "evaluate", "draw", "freeze", "nothing", "nothing")
"""Between forward and backward of a step."""


def _change(model: Model, kind: str, uses_global: bool) -> None:
    for stage in model.stages:
        if kind == "anneal":
            stage.scale *= 0.7
        elif kind == "shift":
            stage.shift.mul_(1.3)
        elif kind == "count":
            stage.count += 5
            stage.calls += 1
        elif kind == "evaluate":
            stage.train(not stage.training)
        elif kind == "draw":
            torch.rand(1, generator=stage.own)
            stage.python.random()
            if uses_global:
                torch.rand(1)
        elif kind == "freeze":
            stage.gate.requires_grad_(not stage.gate.weight.requires_grad)


def outcome(seed: int, mode: str | None, uses_global: bool = True) -> list[Any]:
    """Train some steps; return gradients and the state that is left."""
    choose = random.Random(seed + 1)
    if uses_global:
        torch.manual_seed(seed)
        random.seed(seed)
        numpy.random.seed(seed)
    start = torch.Generator().manual_seed(seed)
    model = Model(seed, mode, uses_global)
    with torch.no_grad():
        for each in model.parameters():
            each.copy_(torch.randn(each.shape, generator=start) * 0.5)
        for name, each in model.named_buffers():
            if name.endswith(("_u", "_v")):
                each.copy_(F.normalize(torch.randn(each.shape, generator=start), dim=0))
    inputs: list[Tensor] = []
    for _ in range(choose.randrange(1, 4)):
        losses = []
        for _ in range(choose.randrange(1, 4)):
            inputs.append(torch.randn(4, SIZE, generator=start).requires_grad_())
            losses.append(model(inputs[-1]).square().mean())
        _change(model, choose.choice(CHANGES), uses_global)
        retains = choose.random() < 0.2
        if choose.random() < 0.3:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(sum(losses).backward, retain_graph=retains).result()  # type: ignore[union-attr]
        else:
            for each in losses:
                each.backward(retain_graph=retains)
                if retains:
                    each.backward()
        if choose.random() < 0.5:
            with torch.no_grad():
                for each in model.parameters():
                    if each.grad is not None:
                        each.sub_(each.grad, alpha=0.01)
    return _left(model, inputs, uses_global)


def _left(model: Model, inputs: list[Tensor], uses_global: bool) -> list[Any]:
    found: list[Any] = [each.grad for each in (*inputs, *model.parameters())]
    found += [*model.parameters(), *model.buffers(), model.log.events]
    for stage in model.stages:
        found += [stage.calls, stage.scale, stage.last, *tree_leaves(stage.cache)]
        found += [stage.own.get_state(), stage.python.random(), float(stage.numbers.rand())]
    if uses_global:
        found += [torch.rand(1), random.random(), float(numpy.random.rand())]
    return found


def expected(seed: int, uses_global: bool = True) -> Expected:
    """Train plainly, or with saved copies where autograd refuses a write."""
    return _programs.expected(partial(outcome, seed, None, uses_global))


def verdict(seed: int, mode: str, right: Expected) -> str:
    """Compare a program under the tape with its expected outcome."""
    return _programs.verdict(partial(outcome, seed, mode), right)


def together(seeds: list[int], mode: str) -> list[str]:
    """Train programs in threads at the same time; compare each with a plain run before."""
    right = [expected(seed, uses_global=False) for seed in seeds]

    def work(seed: int, wanted: Expected) -> str:
        run = partial(outcome, seed, mode, uses_global=False)
        return _programs.verdict(run, wanted, " in threads")

    with ThreadPoolExecutor(len(seeds)) as pool:
        return list(pool.map(work, seeds, right))


def _verdicts(seed: int, mode: str) -> Iterator[str]:
    yield verdict(seed, mode, expected(seed))
    if seed % 10 == MODES.index(mode):
        yield from (f"{each} (threads)" for each in together([seed, seed + 1, seed + 2], mode))


if __name__ == "__main__":
    _programs.compare(_verdicts)
