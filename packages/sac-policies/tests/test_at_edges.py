"""Replays through edges, followed: what is looked at, and that whatever else is there is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from sac_policies import recompute_all
from sac_policies._torch_compat import sequence_number
from sac_policies.engines.recipe._rebuilt import rebuilt
from sac_policies.engines.recipe._recipes import reader
from sac_policies.engines.recipe._run import known_of
from sac_policies.engines.recipe._shared_values import SharedValue, Source
from sac_policies.engines.recipe._writes import habits_of
from sac_policies.engines.recipe.regions._at_edges import (
    AtEdge,
    FollowedValues,
    Given,
    Kept,
    Value,
)
from sac_policies.engines.recipe.regions._recorded import Replayed
from sac_policies.policies._unmatched import subject_of

from ._recipe import is_plain, leaf, run

ALL = recompute_all()
W = leaf(8, 8)


@pytest.fixture(autouse=True)
def _anew() -> None:
    """Nothing is known of functions that other tests ran: they share code."""
    known_of(ALL).repeats.forget()


@pytest.fixture
def x() -> Tensor:
    """An input."""
    return leaf(8, 8)


def shape_of(function: Callable[..., Any], *args: Any) -> Any:
    """What is known of a function's forwards with such inputs."""
    return known_of(ALL).repeats._shape(subject_of(function), habits_of(function), args)


def learnt(function: Callable[..., Tensor], *given: Tensor) -> None:
    """Have it followed once."""
    for _ in range(3):
        run(function, *given).sum().backward()
    assert shape_of(function, *given).followed == 1


def values(function: Callable[..., Any], *args: Any) -> list[Value]:
    """What is replayed, in order of first steps."""
    steps = shape_of(function, *args).steps
    return [what.value for _, _, what in steps if isinstance(what, Replayed)]


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


@pytest.fixture
def masked(x: Tensor) -> tuple[Value, Any, FollowedValues, Tensor]:
    """A sum times a mask: what is written down of it, its node, and who follows."""
    mask = torch.rand(8, 8)

    def function(y: Tensor) -> Tensor:
        return ((y.sin().t() + W) * mask).cos()

    learnt(function, x)
    value = values(function, x)[-1]
    first = sequence_number()
    cos = function(x).grad_fn
    node = cos.next_functions[0][0]
    table = known_of(ALL).tables.anywhere
    return value, node, FollowedValues(table, reader(ALL), first, ((x,), {})), x


def test_same_is_taken(masked: Any) -> None:
    """The sum at the edge, behind it a view and a leaf; the mask from the node."""
    value, node, followed, _ = masked
    cell = followed.value(value, node)
    assert cell is not None
    edge, mask = cell.operands
    assert mask == "_saved_other"
    (maker, below), views = edge
    assert type(maker).__name__ == "AddBackward0"
    assert not views
    assert [len(each[1]) for each in below.operands] == [1, 0]
    assert followed.value(value, node) is cell
    with torch.no_grad():
        made = rebuilt(node, cell, AssertionError)
    assert torch.equal(made, (masked[3].sin().t() + W) * node._saved_other)


def _at(value: Value, at: int, **changes: Any) -> Value:
    operands = list(value.operands or ())
    operands[at] = replace(operands[at], **changes)
    return replace(value, operands=tuple(operands))


def _sum(value: Value) -> Value:
    assert value.operands is not None
    edge = value.operands[0]
    assert isinstance(edge, AtEdge)
    assert isinstance(edge.end, Value)
    return edge.end


CHANGES: dict[str, Callable[[Value], Value]] = {
    "entry": lambda v: replace(v, entry=_sum(v).entry),
    "number": lambda v: replace(v, number=v.number + 1),
    "dtype": lambda v: replace(v, dtype=torch.float64),
    "device": lambda v: replace(v, device=torch.device("meta")),
    "edges": lambda v: replace(v, edges=3),
    "is ready": lambda v: replace(v, operands=None),
    "saved": lambda v: _at(v, 1, unless=1),
    "not saved": lambda v: _at(v, 0, unless=0),
    "deeper": lambda v: _at(v, 0, end=replace(_sum(v), number=0)),
    "view": lambda v: _at(v, 0, end=_at(_sum(v), 0, views=())),
    "other view": lambda v: _at(v, 0, end=_at(_sum(v), 1, views=((type(None), None),))),
    "leaf": lambda v: _at(v, 0, end=None),
    "kept": lambda v: _at(v, 0, end=Kept(0)),
    "given": lambda v: _at(v, 0, end=Given(0)),
    "none given": lambda v: _at(v, 0, end=Given(1)),
    "nobody": lambda v: _at(v, 0, edge=1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_is_not_taken(masked: Any, change: str) -> None:
    """Each thing that is written down is looked at."""
    value, node, followed, _ = masked
    assert followed.value(CHANGES[change](value), node) is None


def test_node_is_the_one_that_was_there_before(masked: Any) -> None:
    """A second reader of a value reads what the first does."""
    value, node, followed, x = masked
    assert followed.value(value, node) is not None
    assert followed.value(value, ((x.sin().t() + W) * torch.rand(8, 8)).grad_fn) is None


def test_callers_node_is_not_taken(masked: Any) -> None:
    """Numbers of another thread's nodes may be those that are expected."""
    value, node, followed, x = masked
    made = FollowedValues(known_of(ALL).tables.anywhere, reader(ALL), followed._first, (x.sin(),))
    made.makers = frozenset({node})
    assert made.value(value, node) is None


@pytest.mark.parametrize("place", [(0, 1), (1, 0)])
def test_kept_value_is_the_one_at_the_edge(masked: Any, place: tuple[int, int]) -> None:
    """Its node and which of the outputs."""
    value, node, followed, _ = masked
    maker, output = node.next_functions[0]
    followed._sources[0] = maker, output, Source(None, reader(ALL))
    kept = _at(value, 0, end=Kept(0))
    assert followed.value(kept, node) is not None
    followed.found.clear()
    other = (node, output) if place[0] else (maker, output + 1)
    followed._sources[0] = *other, Source(None, reader(ALL))
    assert followed.value(kept, node) is None


def test_output_of_a_replay_is_the_first(x: Tensor) -> None:
    """Rules rebuild no other."""
    first = sequence_number()
    one, other = torch.linalg.qr(x)
    nodes = [(each + W).grad_fn for each in (one, other)]
    entries = known_of(ALL).tables.anywhere
    entry = entries[type(nodes[0])]
    inner = Value(1, entry, 0, True, None, None)
    edges = AtEdge(0, None, (), inner), AtEdge(1, None, (), None)
    for number, node in enumerate(nodes, 1):
        followed = FollowedValues(entries, reader(ALL), first, ())
        followed.found[1] = one.grad_fn, SharedValue(), 0
        value = Value(0, entry, number, True, one.dtype, one.device, 2, edges)
        assert (followed.value(value, node) is None) == (number == 2)


class Subclass(nn.Parameter):
    """A parameter that may have operators of its own."""


def test_leaf_is_plain(masked: Any) -> None:
    """What a subclass reads as is not known."""
    value, _, _, x = masked
    first = sequence_number()
    node = ((x.sin().t() + Subclass(W.detach())) * torch.rand(8, 8)).cos().grad_fn
    followed = FollowedValues(known_of(ALL).tables.anywhere, reader(ALL), first, ((x,), {}))
    assert followed.value(value, node.next_functions[0][0]) is None


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
    return (one * 2.0).sin() + ((other if on else one) * 3.0).cos()


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
