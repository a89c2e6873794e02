"""What recomputation sees when state changes between forward and backward.

Each situation runs a plain module, the same module checkpointed in three ways, and torch's own
checkpoint. Gradients and the state after backward must match those of the plain module. The manual
has the same table, and a test compares the two.
"""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError, checkpoint

from ckpt_wrap import (
    apply_activation_checkpointing,
    checkpoint_,
    checkpoint_wrapper,
)

SITUATIONS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any], str, str]] = {}


def situation(title: str, here: str = "right", torchs: str = "wrong"):
    """Add a situation: a function of a module that makes the situation, and a callable for it.

    The function returns the values that must match the plain module's.
    """

    def add(function):
        SITUATIONS[title] = (function.__kwdefaults__["make"], function, here, torchs)
        return function

    return add


class Block(nn.Module):
    """A linear layer between functions that save their results."""

    def __init__(self, use=None) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.use = use
        self.set_up()

    def set_up(self) -> None:
        """Set attributes."""

    def forward(self, x, *args):
        return torch.tanh(self.linear(x) * self.scale(x, *args)).exp()

    def scale(self, x, *args):
        """A factor that depends on the state."""
        return self.use(*args)


def _x() -> torch.Tensor:
    return torch.linspace(-1, 1, 8).reshape(2, 4)


class Mode:
    def __init__(self, name):
        self.name = name


FULL = Mode("full")


@situation("an object that forward compares by identity", torchs="right")
def _(block, call, *, make=lambda: Block(lambda mode: 0.5 if mode is FULL else 2.0)):
    call(_x(), FULL).sum().backward()


class Cache:
    def __init__(self):
        self.layers = []

    def update(self, value):
        self.layers.append(value.detach().mean())
        return 1 + sum(self.layers)


class Caches(Block):
    def scale(self, x, cache):
        return cache.update(x)


@situation("a cache in an argument, filled by forward")
def _(block, call, *, make=Caches):
    cache = Cache()
    (call(_x(), cache) + call(_x() * 2, cache)).sum().backward()
    return [torch.stack(cache.layers)]


@situation("a list or dict in an argument, changed after forward")
def _(block, call, *, make=lambda: Block(lambda names, by_name: len(names) + by_name.get("a", 5))):
    names, by_name = ["a"], {}
    loss = call(_x(), names, by_name).sum()
    names.append("b")
    by_name["a"] = 7
    loss.backward()
    return [len(names), by_name["a"]]


@situation("a tensor in an argument, changed in place after forward", "error", "error")
def _(block, call, *, make=lambda: Block(lambda scale: scale)):
    scale = torch.full((4,), 2.0)
    loss = call(_x(), scale).sum()
    scale.add_(1)
    loss.backward()


@situation("the same, passed in a list", "error")
def _(block, call, *, make=lambda: Block(lambda scales: scales[0])):
    scale = torch.full((4,), 2.0)
    loss = call(_x(), [scale]).sum()
    scale.add_(1)
    loss.backward()


class Slots(Block):
    def scale(self, x, cache, slot):
        with torch.no_grad():
            cache[slot] = x.mean()
        return cache[: slot + 1].clone().sum()


@situation("a tensor of slots in an argument, each written once by forward", "error", "error")
def _(block, call, *, make=Slots):
    cache = torch.zeros(3)
    sum(call(_x() + slot, cache, slot).sum() for slot in range(3)).backward()


class State(Block):
    start: Any = None

    def set_up(self):
        self.state = self.start

    def scale(self, x):
        before = 1.0 if self.state is None else self.state
        self.state = before * 0.5 + torch.tanh(self.linear(x)).mean()
        return before


class NumberState(State):
    start = 3.0


class TensorState(State):
    start = torch.ones(())


def _three_calls(block, call):
    sum(call(_x() + i).sum() for i in range(3)).backward()
    return [block.state]


@situation("an attribute that is None, then a tensor with a graph", torchs="error")
def _(block, call, *, make=State):
    return _three_calls(block, call)


@situation("a number that becomes a tensor with a graph", torchs="error")
def _(block, call, *, make=NumberState):
    return _three_calls(block, call)


@situation("a tensor that becomes one with a graph")
def _(block, call, *, make=TensorState):
    return _three_calls(block, call)


class Auxiliary(Block):
    """Stores an auxiliary loss, which its owner adds up and resets."""

    def set_up(self):
        self.loss, self.losses = None, []

    def scale(self, x):
        self.loss = self.linear(x).square().mean()
        self.losses.append(self.loss)
        return 2.0


@situation("an auxiliary loss in an attribute, reset before backward")
def _(block, call, *, make=Auxiliary):
    loss = call(_x()).sum() + block.loss
    block.loss = None
    loss.backward()
    return [block.loss is None]


@situation("a list of auxiliary losses, cleared before backward")
def _(block, call, *, make=Auxiliary):
    loss = call(_x()).sum() + sum(block.losses)
    block.losses.clear()
    loss.backward()
    return [len(block.losses)]


class Counter(Block):
    def set_up(self):
        self.calls = 0
        self.load = [0, {"a": 0}]

    def scale(self, x):
        self.calls += 1
        self.load[0] += 1
        self.load[1]["a"] += 1
        return self.calls + self.load[0] + self.load[1]["a"]


@situation("counters: a number, a list, a nested dict")
def _(block, call, *, make=Counter):
    (call(_x()) + call(_x() * 2)).sum().backward()
    return [block.calls, block.load[0], block.load[1]["a"]]


class Holds(Block):
    def set_up(self):
        self.cache = Cache()

    def scale(self, x):
        return self.cache.update(x)


@situation("an object in an attribute, changed by forward", "wrong")
def _(block, call, *, make=Holds):
    (call(_x()) + call(_x() * 2)).sum().backward()
    return [len(block.cache.layers)]


@situation("a logged number, reset before backward", torchs="right")
def _(block, call, *, make=lambda: Block(lambda: 2.0)):
    block.logged = 5.0
    loss = call(_x()).sum()
    block.logged = 0.0
    loss.backward()
    return [block.logged]


class Annealed(Block):
    def set_up(self):
        self.heat = 1.0

    def scale(self, x):
        return self.heat


@situation("a number that forward reads, changed before backward")
def _(block, call, *, make=Annealed):
    loss = call(_x()).sum()
    block.heat = 3.0
    loss.backward()
    return [block.heat]


@situation("the same, set to another value for each call")
def _(block, call, *, make=Annealed):
    losses = []
    for block.heat in (1.0, 2.0, 3.0):
        losses.append(call(_x()).sum())
    sum(losses).backward()
    return [block.heat]


class Training(Block):
    def scale(self, x):
        return 2.0 if self.training and self.linear.training else 1.0


@situation("`eval()` before backward")
def _(block, call, *, make=Training):
    loss = call(_x()).sum()
    block.eval()
    loss.backward()
    return [block.training, block.linear.training]


def _double(module, args, result):
    return result * 2


@situation("a hook below, added before backward")
def _(block, call, *, make=lambda: Block(lambda: 1.0)):
    loss = call(_x()).sum()
    block.linear.register_forward_hook(_double)
    loss.backward()
    return [len(block.linear._forward_hooks)]


@situation("a hook below, removed before backward")
def _(block, call, *, make=lambda: Block(lambda: 1.0)):
    def shifted(module, args, kwargs):
        return (args[0] + 1,), kwargs

    handles = [
        block.linear.register_forward_hook(_double),
        block.linear.register_forward_pre_hook(shifted, with_kwargs=True),
    ]
    loss = call(_x()).sum()
    for handle in handles:
        handle.remove()
    loss.backward()
    return [len(block.linear._forward_hooks), len(block.linear._forward_pre_hooks)]


@situation("a submodule replaced before backward, such as an adapter")
def _(block, call, *, make=lambda: Block(lambda: 1.0)):
    loss, before = call(_x()).sum(), block.linear
    block.linear = nn.Linear(4, 4)
    loss.backward()
    assert block.linear.weight.grad is None
    block.linear = before


class Running(Block):
    def set_up(self):
        self.register_buffer("average", torch.ones(4))
        self.norm = nn.BatchNorm1d(4)

    def scale(self, x):
        before = self.average.clone()
        self.average.lerp_(x.mean(0), 0.5)
        return self.norm(x + before)


@situation("buffers that forward reads and writes")
def _(block, call, *, make=Running):
    (call(_x()) + call(_x() * 2)).sum().backward()
    return list(block.buffers())


class Queue(Block):
    def set_up(self):
        self.register_buffer("queue", torch.ones(1 << 17))

    def scale(self, x):
        before = self.queue[:4].clone()
        self.queue[:4] += x[0]
        return before


@situation("a large buffer that forward reads and writes")
def _(block, call, *, make=Queue):
    for _ in range(2):
        call(_x()).sum().backward()
    return [block.queue]


class Registers(Block):
    def scale(self, x):
        if not hasattr(self, "made"):
            self.register_buffer("made", x.mean(0))
            return 1.0
        return self.made


@situation("a buffer that forward registers", torchs="error")
def _(block, call, *, make=Registers):
    (call(_x()) + call(_x() * 2)).sum().backward()
    return list(block.buffers())


@situation("random numbers of torch", torchs="right")
def _(block, call, *, make=lambda: Block(lambda: torch.rand(2, 4))):
    torch.manual_seed(0)
    call(_x()).sum().backward()
    return [torch.rand(1)]


@situation("random numbers of Python")
def _(block, call, *, make=lambda: Block(lambda: random.random() + random.gauss())):
    random.seed(0)
    (call(_x()) + call(_x())).sum().backward()
    return [random.random(), random.gauss()]


@situation("random numbers of NumPy")
def _(block, call, *, make=lambda: Block(lambda: np.random.rand() + np.random.randn())):
    np.random.seed(0)
    (call(_x()) + call(_x())).sum().backward()
    return [np.random.rand(), np.random.randn()]


class Owns(Block):
    def set_up(self):
        self.torch = torch.Generator().manual_seed(1)
        self.others = {"python": random.Random(1), "numpy": np.random.default_rng(1)}

    def scale(self, x, generator):
        drawn = self.others["python"].random() + self.others["numpy"].random()
        return torch.rand(4, generator=self.torch) + torch.rand(4, generator=generator) + drawn


@situation("generators in attributes and arguments")
def _(block, call, *, make=Owns):
    generator = torch.Generator().manual_seed(2)
    (call(_x(), generator) + call(_x(), generator)).sum().backward()
    python, numpy = block.others.values()
    return [torch.rand(1, generator=block.torch), python.random(), numpy.random()]


@situation("a parameter written before backward", "error")
def _(block, call, *, make=lambda: Block(lambda: 1.0)):
    loss = call(_x().requires_grad_()).sum()
    with torch.no_grad():
        block.linear.weight.add_(1)
    loss.backward()


@situation("a bias written before backward", "error")
def _(block, call, *, make=lambda: Block(lambda: 1.0)):
    loss = call(_x()).sum()
    with torch.no_grad():
        block.linear.bias.add_(1)
    loss.backward()


@situation("a parameter replaced before backward", "error")
def _(block, call, *, make=lambda: Block(lambda: 1.0)):
    loss, before = call(_x()).sum(), block.linear.bias
    block.linear.bias = nn.Parameter(torch.ones(4))
    loss.backward()
    block.linear.bias = before


class Experts(Block):
    """Runs two of many submodules, and changes one that it does not run."""

    def set_up(self):
        self.experts = nn.ModuleList(Running() for _ in range(12))

    def scale(self, x):
        for index in (1, 5):
            x = self.experts[index](x)
        return x


@situation("buffers of the experts that run, of many", torchs="error")
def _(block, call, *, make=Experts):
    loss = (call(_x()) + call(_x() * 2)).sum()
    with torch.no_grad():
        block.experts[7].linear.weight.add_(1)  # it did not run
    block.experts[5].eval()
    loss.backward()
    assert type(block.experts._modules) is type(nn.Module()._modules)
    return list(block.buffers())


def _applied(block):
    holder = nn.Sequential(block)
    apply_activation_checkpointing(holder, check_fn=lambda module: module is block)
    return holder[0]


def _torch(block):
    return lambda *args: checkpoint(block, *args, use_reentrant=False)


WAYS = {
    "checkpoint_": checkpoint_,
    "checkpoint_wrapper": checkpoint_wrapper,
    "apply_activation_checkpointing": _applied,
}


def _values(block, call, run):
    results = run(block, call) or []
    gradients = [p.grad for p in block.parameters() if p.grad is not None]
    return [torch.as_tensor(value).detach() for value in (*results, *gradients)]


def outcome(title: str, way: Callable[[nn.Module], Any]) -> str:
    """ "right", "wrong" or "error": one situation in one way, compared with the plain module."""
    make, run, _, _ = SITUATIONS[title]
    torch.manual_seed(0)
    plain = make()
    changed = copy.deepcopy(plain)
    may_fail = SITUATIONS[title][2] == "error"
    try:
        expected = _values(plain, plain, run)
    except RuntimeError:
        assert may_fail
        expected = None
    try:
        got = _values(changed, way(changed), run)
    except RuntimeError if way is _torch else CheckpointError:  # noqa: B030
        return "error"
    same = (
        expected is not None and len(got) == len(expected) and all(map(torch.equal, got, expected))
    )
    return "right" if same else "wrong"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("title", SITUATIONS)
def test_recomputation_matches_the_plain_module(title, way):
    """Or an error says why it cannot."""
    assert outcome(title, WAYS[way]) == SITUATIONS[title][2]


@pytest.mark.parametrize("title", SITUATIONS)
def test_the_page_says_what_torchs_checkpoint_does(title):
    """The column of torch's checkpoint in the manual's table."""
    assert outcome(title, _torch) == SITUATIONS[title][3]


def test_the_manual_has_this_table():
    """Every situation, and no other."""
    manual = Path(__file__).parents[3] / "docs" / "ckpt-wrap" / "manual.md"
    if not manual.exists():
        pytest.skip("needs the repository")
    section = manual.read_text().partition("### What recomputation reads")[2].partition("\n### ")[0]
    rows = re.findall(r"^\| (.+?) \| (right|error|wrong) \| (right|error|wrong) \|$", section, re.M)
    assert rows == [(title, torchs, here) for title, (_, _, here, torchs) in SITUATIONS.items()]
