"""What replays read at edges, written down; and that whatever is another graph is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from sac_policies.engines.recipe._run import known_of
from sac_policies.engines.recipe.regions._at_edges import AtEdge, Given, Kept, Seen, Value

from ._followed import ALL, W, learnt, shape_of, values
from ._recipe import bytes_kept, is_plain, leaf, replays_products_with_numbers, run


@pytest.fixture(autouse=True)
def _anew() -> None:
    """Nothing is known of functions that other tests ran: they share code."""
    known_of(ALL).repeats.forget()


@pytest.fixture
def x() -> Tensor:
    """An input."""
    return leaf(8, 8)


class Changing:
    """A function of one tensor that does something else when it is told to.

    Attributes:
        on: what it is told.
    """

    def __init__(self, function: Callable[[Tensor, bool], Tensor]) -> None:
        self.on = False
        self._function = function

    def __call__(self, y: Tensor, *others: Tensor) -> Tensor:
        """Run it."""
        return self._function(y, self.on, *others)

    def is_found(self, x: Tensor, *others: Tensor) -> bool:
        """Whether a change leaves the steps, and gradients as they are without checkpointing."""
        learnt(self, x, *others)
        self.on = True
        same = is_plain(self, x, *others)
        return same and shape_of(self, x, *others).steps is None


def test_operands_are_written_down(x: Tensor) -> None:
    """From a leaf, another replay behind views, what is kept and what was given."""
    given = x * 2.0

    def function(y: Tensor) -> Tensor:
        kept = torch.linalg.inv(y + W)  # no rule
        made = (y + W).cos() + (y.sin().t() + W).cos()
        return made + kept.sin() + (kept + W).cos()

    for _ in range(3):
        run(function, given).sum().backward(retain_graph=True)
    assert shape_of(function, given).followed == 1
    ends = {
        type(each.end)
        for value in values(function, given)
        for each in value.operands or ()
        if isinstance(each, AtEdge)
    }
    assert ends == {Kept, Given, Value, type(None)}


@pytest.mark.parametrize("given", [0.5, torch.full((64,), 0.5)], ids=["a number", "a tensor"])
def test_what_a_call_was_given_is_seen_in_each_forward(given: Any) -> None:
    """It is that of the forward, whatever was given when steps were written down."""
    x, now = leaf(64, 64), [given]

    def function(y: Tensor) -> Tensor:
        return (y.sin() + now[0]).cos()

    learnt(function, x)
    (edge, seen) = values(function, x)[-1].operands or ()
    assert isinstance(edge, AtEdge)
    assert isinstance(seen, AtEdge)
    assert seen.end == Seen(1)
    before = bytes_kept(function, x)
    now[0] = given * 3.0
    assert bytes_kept(function, x) == before
    out = run(function, x)
    expected = torch.autograd.grad(function(x).sum(), x)[0]
    now[0] = given * 5.0
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], expected)
    assert shape_of(function, x).followed == 4


@pytest.mark.parametrize("now", [torch.ones(64, 64), leaf(64, 64), "written"])
def test_what_is_of_no_use_leaves_the_steps(now: Any) -> None:
    """A large tensor, one with a gradient, and one that was written to since."""
    x, half = leaf(64, 64), torch.full((64,), 0.5)

    def function(y: Tensor, on: bool) -> Tensor:
        other = now if on and now != "written" else half
        made = y.sin() + other
        if on:
            half.mul_(1.0)
        return made.cos()

    assert Changing(function).is_found(x)


@replays_products_with_numbers
def test_hooks_of_others_inside_leave_the_steps(x: Tensor) -> None:
    """A number is saved without hooks; the tensor that is there now may be read once."""
    half, packed = torch.tensor(0.5), []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    def function(y: Tensor, on: bool) -> Tensor:
        with saved_tensors_hooks(pack, lambda held: held):
            made = y * (half if on else 0.5)
        return made.cos()

    assert Changing(function).is_found(x)
    assert packed


@pytest.mark.parametrize(
    "function",
    [
        lambda y, on: (y + (W.t() if on else W)).sin(),
        lambda y, on: (y.view(8, 8) if on else y.t()).add(W).sin(),
        lambda y, on: ((y.cos() if on else y.sin()).neg() + W).sin(),
        lambda y, on: (y + (W.detach() if on else W)).sin(),
        lambda y, on: torch.cat((y, W, W) if on else (y, W)).sin()[:8],
        lambda y, on: _either(y + W, y - W, on),
        lambda y, on: _fills(y, on),
        lambda y, on: _copied(y, on),
        lambda y, on: _rewritten(y, on),
        lambda y, on: (y.to(torch.bfloat16 if on else torch.float64) + W).to(torch.float32).sin(),
    ],
    ids=[
        *("a view", "another view", "another operator", "no edge", "another edge", "another sum"),
        *("part of a storage", "another format", "a kept value that was written to", "a dtype"),
    ],
)
def test_another_graph_leaves_the_steps(
    x: Tensor, function: Callable[[Tensor, bool], Tensor]
) -> None:
    """Gradients are right, and nothing is replayed from what is no more."""
    assert Changing(function).is_found(x)


def _either(one: Tensor, other: Tensor, on: bool) -> Tensor:
    return one.neg().sin() + (other if on else one).neg().cos()


def _fills(y: Tensor, on: bool) -> Tensor:
    base = torch.empty(16, 8)[:8] if on else torch.empty(8, 8)
    return torch.add(y.neg(), W, out=None).sin() if not on else _out(y, base)


def _out(y: Tensor, base: Tensor) -> Tensor:
    made = y.neg() + W
    made.data = base.copy_(made.detach())
    return made.sin()


def _copied(y: Tensor, on: bool) -> Tensor:
    made = (y + W).t()
    return made.clone(memory_format=torch.preserve_format if on else torch.contiguous_format).sin()


class Doubled(torch.autograd.Function):
    """Has no rule, and saves nothing."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        return y * 2.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2.0


def _rewritten(y: Tensor, on: bool) -> Tensor:
    kept = Doubled.apply(y)
    if on:
        with torch.no_grad():
            kept.mul_(1.0)
    return kept.sin() + (kept + W).cos()
