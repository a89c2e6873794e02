"""The contract: a step has the plain model's gradients and state, or an error says why not.

Each situation is a program in which a second forward would differ from the first, or nearly does.
The manual has the table.
"""

from __future__ import annotations

import copy
import functools
import itertools
import random
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.flop_counter import FlopCounterMode

from sac_policies import MATMULS, checkpoint, fit_, recompute_all, save_by_bytes, save_ops
from sac_policies._errors import SacError
from sac_policies._torch_compat._module_calls import called_at

np = pytest.importorskip("numpy")

pytestmark = [
    pytest.mark.filterwarnings("ignore::sac_policies.UnmatchedEntryWarning"),  # of dropped layers
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),  # dynamo's
    pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning"),
    pytest.mark.usefixtures("fresh_compiler"),
]

X = torch.linspace(-1, 1, 64 * 16).view(64, 16)
Step = Callable[[nn.Module], list[torch.Tensor]]


class Block(nn.Module):
    """A residual block; subclasses change its input or its state."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the block."""
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks in a row."""

    def __init__(self, block: Callable[[], nn.Module], count: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the blocks."""
        for block in self.blocks:
            x = block(x)
        return x


def state(model: nn.Module) -> list[torch.Tensor]:
    """Gradients and buffers."""
    return [
        *(p.grad.clone() for p in model.parameters() if p.grad is not None),
        *(b.clone() for b in model.buffers()),
    ]


def steps(model: nn.Module, between: Callable[[nn.Module], object] | None = None) -> Any:
    """Two steps; `between` runs after each forward."""
    found = []
    for number in range(2):
        model.zero_grad()
        loss = model(X + number).square().mean()
        if between is not None:
            between(model)
        loss.backward()
        found += state(model)
    return found


@dataclass(frozen=True)
class Situation:
    """A program.

    Attributes:
        block: makes a block.
        step: trains, and returns everything that must be the same.
        net: makes the model of blocks.
        ready: prepares the model before it is checkpointed or fitted.
    """

    block: Callable[[], nn.Module] = Block
    step: Step = steps
    net: Callable[[Callable[[], nn.Module]], nn.Module] = Net
    ready: Callable[[nn.Module], object] = lambda model: None


class Counter(Block):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x * (0.5 if self.calls > 1 else 1.0))


class Annealed(Block):
    rate = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward((x * self.rate).sin())


def anneal(model: nn.Module) -> None:
    for block in model.blocks:
        block.rate *= 0.5


class Average(Block):
    """Divides by a running size, which it updates in every forward, or in some."""

    every = 1

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("size", torch.ones(()))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        if int(self.count) % self.every == 0:
            self.size.mul_(0.9).add_(x.detach().abs().mean())
        return super().forward((x / self.size.clone()).tanh())


class Sometimes(Average):
    every = 2


def rescale(model: nn.Module) -> None:
    for block in model.blocks:
        block.size.mul_(2)


class Reads(Average):
    """Reads the buffer without a copy, as an offset that autograd does not save."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Block.forward(self, (x + self.size).sin())


class Compiled(nn.Module):
    """Compiled code that writes a buffer and reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.register_buffer("size", torch.ones(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        self.size.mul_(0.9).add_(y.detach().abs().mean(0))
        return x + self.down((y / self.size).tanh().exp())


def compile_blocks(model: nn.Module) -> None:
    torch.compiler.reset()
    for block in model.blocks:
        block.compile(backend="aot_eager")


def measured_backward(model: nn.Module) -> list[torch.Tensor]:
    """Backward counts its FLOPs; forward did not."""
    model.zero_grad()
    loss = model(X).square().mean()
    with FlopCounterMode(display=False):
        loss.backward()
    return state(model)


class Shifted(Block):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward((x + self.shift).sin())


@torch.no_grad()
def shift(model: nn.Module) -> None:
    for block in model.blocks:
        block.shift.add_(0.5)


class Normed(Block):
    """Batch norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(16), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.drop(x))


def train_after_eval(model: nn.Module) -> list[torch.Tensor]:
    return steps(model.train())


def hooked(model: nn.Module) -> list[torch.Tensor]:
    """Hooks of all kinds, which count and change values."""
    calls = torch.zeros(5)

    def count(kind: int, value: Any) -> Any:
        calls[kind] += 1
        return value

    for block in model.blocks:
        block.register_forward_pre_hook(lambda _, given: count(0, (given[0] * 2,)))
        block.up.register_forward_hook(lambda _, given, out: count(1, out.sin()))
        block.register_full_backward_hook(lambda *_: count(2, None))
        block.up.weight.register_hook(lambda grad: count(3, grad * 2))
        block.up.weight.register_post_accumulate_grad_hook(lambda _: count(4, None))
    return [*steps(model), calls]


class Remembers(Block):
    """Adds the mean of its last input."""

    last: Any = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward((x + self.last).sin())
        self.last = x.detach().mean(0)
        return out


class OwnNumbers(Block):
    """Noise from a generator."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = torch.Generator().manual_seed(1)

    def noise(self) -> Any:
        return torch.rand(16, generator=self.numbers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward((x * self.noise()).sin())


class NumpyNumbers(OwnNumbers):
    def noise(self) -> Any:
        return float(np.random.rand())


class PythonNumbers(OwnNumbers):
    def noise(self) -> Any:
        return random.random()


class Adapted(Block):
    """Adapters that a list names, as in PEFT."""

    def __init__(self) -> None:
        super().__init__()
        self.adapters = nn.ModuleDict({name: nn.Linear(16, 16) for name in "ab"})
        self.active = ["a"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.active:
            x = x + self.adapters[name](x.sin())
        return super().forward(x)


def switch_adapter(model: nn.Module) -> None:
    for block in model.blocks:
        block.active[:] = ["b"]


class Router(nn.Module):
    """Sends rows to one of two experts, by noisy scores."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(16, 2)
        self.experts = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.scores(x)
        chosen = (scores + torch.randn_like(scores)).argmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = torch.where(chosen == number)[0]
            out = out.index_add(0, rows, expert(x[rows]) * scores[rows, number, None])
        return out


class LayerDrop(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if torch.rand(()) < 0.5 else x.sin()


class Cached(Block):
    """Attends to all inputs so far, which it appends to a list."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x.detach())
        return super().forward((x * sum(each.mean() for each in self.seen)).sin())


def in_two_threads(model: nn.Module) -> list[torch.Tensor]:
    """Two models train at the same time."""
    models, found = [model, copy.deepcopy(model)], {}

    def train(number: int) -> None:
        try:
            found[number] = steps(models[number])
        except Exception as error:
            found[number] = error

    threads = [threading.Thread(target=train, args=(number,)) for number in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    for each in found.values():
        if isinstance(each, Exception):
            raise each
    return [*found[0], *found[1]]


class Tasks(Block):
    task = 0

    def __init__(self) -> None:
        super().__init__()
        self.shifts = nn.Parameter(torch.linspace(-1, 1, 32).view(2, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward((x + self.shifts[self.task]).sin())


def both_tasks(model: nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    found = []
    for task in range(2):
        for block in model.blocks:
            block.task = task
        found.append(model(X))
    (found[0] * found[1]).mean().backward()
    return state(model)


def frozen_between(model: nn.Module) -> list[torch.Tensor]:
    """As a discriminator is while the generator's loss is made."""
    model.zero_grad()
    source = X.clone().requires_grad_()
    loss = model(source).mean()
    model.requires_grad_(False)
    loss.backward()
    model.requires_grad_(True)
    return [source.grad, *state(model)]


class Feeds(Block):
    """Takes the next number of an iterator."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = itertools.cycle([1.0, 0.5, 0.25])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward((x * next(self.rates)).sin())


def schedule_dropout(model: nn.Module) -> None:
    for block in model.blocks:
        block.drop.p = 0.6


class Spectral(Block):
    """Power iteration in each training forward changes its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.utils.parametrizations.spectral_norm(self.up)


class InPlaceNet(Net):
    """Adds to the block's input in place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1
        for block in self.blocks:
            x += block(x * 2)
        return x


def accumulated(model: nn.Module) -> list[torch.Tensor]:
    """Two forwards, one backward."""
    model.zero_grad()
    sum(model(X + number).square().mean() for number in range(2)).backward()
    return state(model)


def penalty(model: nn.Module) -> list[torch.Tensor]:
    """A gradient is part of the loss."""
    model.zero_grad()
    source = X.clone().requires_grad_()
    out = model(source).sum()
    (grad,) = torch.autograd.grad(out, source, create_graph=True)
    (out + grad.square().sum()).backward()
    return state(model)


class UNet(nn.Module):
    """Blocks on the way down push to a stack, from which those on the way up pop."""

    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(4))
        self.stack: list[torch.Tensor] = []
        for number, each in enumerate(self.blocks):
            each.stack, each.goes_down = self.stack, number < 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Skips(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.goes_down:
            self.stack.append(super().forward(x))
            return self.stack[-1].sin()
        return super().forward(x + self.stack.pop())


class Carries(Block):
    """A recurrent state, detached from step to step."""

    carried: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = torch.zeros_like(x) if self.carried is None else self.carried.detach()
        self.carried = torch.tanh(super().forward(x) + before)
        return self.carried


def backward_twice(model: nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    loss = model(X).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    return state(model)


def copied_step(model: nn.Module) -> list[torch.Tensor]:
    """The copy of a fitted model is fitted again."""
    twin = copy.deepcopy(model)
    if any("forward" in vars(block) for block in model.blocks):
        fit_(twin, X, "90%", loss=mean)
    return [*steps(twin), *steps(model)]


SITUATIONS = {
    "a counter": Situation(Counter),
    "a number annealed between forward and backward": Situation(
        Annealed, partial(steps, between=anneal)
    ),
    "a buffer that each forward writes": Situation(Average),
    "a buffer that some forwards write": Situation(Sometimes),
    "a buffer that compiled code writes": Situation(Compiled, ready=compile_blocks),
    "a buffer written between forward and backward": Situation(
        Reads, partial(steps, between=rescale)
    ),
    "a parameter written before backward": Situation(Shifted, partial(steps, between=shift)),
    "fitted in evaluation, then trained": Situation(Normed, train_after_eval, ready=nn.Module.eval),
    "evaluation mode between forward and backward": Situation(
        Normed, lambda model: steps(model.train(), between=nn.Module.eval)[: len(state(model))]
    ),
    "hooks of all kinds": Situation(Block, hooked),
    "state in an attribute": Situation(Remembers),
    "a generator of the block": Situation(OwnNumbers),
    "NumPy's random numbers": Situation(NumpyNumbers),
    "Python's random numbers": Situation(PythonNumbers),
    "adapters switched before backward": Situation(Adapted, partial(steps, between=switch_adapter)),
    "backward under another mode": Situation(Block, measured_backward),
    "compiled blocks, backward under another mode": Situation(
        Block, measured_backward, ready=compile_blocks
    ),
    "noise in a router": Situation(Router),
    "LayerDrop": Situation(LayerDrop),
    "a cache that grows": Situation(Cached),
    "two threads": Situation(Average, in_two_threads),
    "called twice with another attribute": Situation(Tasks, both_tasks),
    "frozen between forward and backward": Situation(Block, frozen_between),
    "a copy of the model": Situation(Block, copied_step),
    "an iterator of the block": Situation(Feeds),
    "dropout changed before backward": Situation(
        Normed, lambda model: steps(model, between=schedule_dropout)
    ),
    "spectral norm": Situation(Spectral),
    "a residual added in place": Situation(Block, net=InPlaceNet),
    "two forwards, one backward": Situation(Normed, accumulated),
    "a gradient penalty": Situation(Block, penalty),
    "a stack of skip connections": Situation(Skips, net=UNet),
    "a carried state": Situation(Carries),
    "backward twice": Situation(Normed, backward_twice),
}


def mean(out: torch.Tensor) -> torch.Tensor:
    """The loss that is fitted."""
    return out.square().mean()


def by_torch(model: nn.Module) -> None:
    """Checkpoint the blocks with torch."""
    for block in model.blocks:
        inner = partial(torch_checkpoint, block.forward, use_reentrant=False)
        block.forward = inner  # type: ignore[method-assign]


def by_policy(policy: Any, model: nn.Module) -> None:
    """Checkpoint the blocks with a policy."""
    for block in model.blocks:
        inner = partial(checkpoint, block.forward, policy=policy)
        block.forward = inner  # type: ignore[method-assign]


_SMALLEST: dict[Any, int] = {}


def by_fit(factor: float, model: nn.Module) -> None:
    """Fit the model to its smallest peak, or to that many times as much."""
    block = model.blocks[0]
    key = type(model), type(block), block.training, called_at(block)
    if key not in _SMALLEST:
        _SMALLEST[key] = fit_(model, X, 1, loss=mean).smallest_bytes
    assert fit_(model, X, int(factor * _SMALLEST[key]), loss=mean)


WAYS: dict[str, Callable[[nn.Module], object]] = {
    "nothing kept": partial(by_policy, recompute_all()),
    "matmuls kept": partial(by_policy, save_ops(MATMULS)),
    "large kept": partial(by_policy, save_by_bytes(at_least=1 << 13)),
    "fit_, smallest": partial(by_fit, 1.0),
    "fit_, larger": partial(by_fit, 1.15),
    "fit_, all": partial(by_fit, 100.0),
}


def trained(situation: Situation, way: Callable[[nn.Module], object]) -> list[torch.Tensor]:
    """Everything that the step returns, with blocks checkpointed in one way."""
    torch.manual_seed(0)
    model = situation.net(situation.block)
    situation.ready(model)
    way(model)
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    return situation.step(model)


@functools.cache
def plainly(name: str) -> list[torch.Tensor]:
    """Everything that the step of a plain model returns."""
    return trained(SITUATIONS[name], lambda model: None)


def outcome(name: str, way: Callable[[nn.Module], object]) -> str:
    """Compare with the plain model."""
    plain, situation = plainly(name), SITUATIONS[name]
    try:
        found = trained(situation, way)
    except SacError as error:
        return f"error: {error}"
    except (RuntimeError, IndexError) as error:
        return f"torch's error: {error}"
    same = len(found) == len(plain) and all(map(torch.equal, found, plain))
    return "same" if same else "other"


REFUSED = {
    "a parameter written before backward": r"tensor of shape \[16\] .* was changed in place",
    "an iterator of the block": "attribute 'rates' of a Feeds is a cycle",
}
"""Situations in which some of our ways raise, and what the error says."""
SAME_BY_TORCH = {
    "backward under another mode",
    "compiled blocks, backward under another mode",
    "a copy of the model",
    "a residual added in place",
    "noise in a router",
    "LayerDrop",
    "a gradient penalty",
}
"""Situations in which torch's checkpoint has the plain gradients and state."""
RAISES_IN_TORCH = {
    "evaluation mode between forward and backward",
    "frozen between forward and backward",
    "a stack of skip connections",
}
"""Situations in which torch's checkpoint raises; in the others it is wrong without an error."""
AT_NIGHT = {"matmuls kept", "large kept", "fit_, larger", "fit_, all"}


@pytest.mark.parametrize(
    "way",
    [pytest.param(each, marks=[pytest.mark.nightly] * (each in AT_NIGHT)) for each in WAYS],
)
@pytest.mark.parametrize("name", SITUATIONS)
def test_step_is_the_plain_one_or_says_why_not(name: str, way: str) -> None:
    """Bit-identical gradients and state, or an error that names what changed."""
    found = outcome(name, WAYS[way])
    if found != "same":
        assert re.search(f"^error: sac_policies.*{REFUSED.get(name, 'nothing')}", found)


@pytest.mark.nightly
@pytest.mark.parametrize("name", SITUATIONS)
def test_torchs_column_of_the_table_is_right(name: str) -> None:
    """The manual says what torch's checkpoint does."""
    expected = "same" if name in SAME_BY_TORCH else "other"
    expected = "torch's error" if name in RAISES_IN_TORCH else expected
    assert outcome(name, by_torch).partition(":")[0] == expected
