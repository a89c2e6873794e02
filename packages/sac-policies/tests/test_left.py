"""Who leaves its steps keeps what it would have kept without them, wherever that is."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from sac_policies import MATMULS, Policy, recompute_all, save_ops
from sac_policies.engines.recipe._recipes import reader
from sac_policies.engines.recipe._run import known_of
from sac_policies.engines.recipe._writes import Habit, habits_of
from sac_policies.engines.recipe.regions._followed import FollowedValues
from sac_policies.engines.recipe.regions._left import Note, Rest
from sac_policies.engines.recipe.regions._recorded import END, Shape
from sac_policies.policies._unmatched import subject_of

from ._followed import BIAS, ROWS, WEIGHTS, WIDTH, gpt, in_views, llama, waiting, written
from ._recipe import Counts, bytes_kept, is_plain, leaf, run

ALL, PRODUCTS = recompute_all(), save_ops(MATMULS)


def _turned(x: Tensor) -> Tensor:
    """Products that nobody saves, rotated by constants, and one of which a view is saved."""
    cosines = torch.linspace(-1, 1, 2 * WIDTH).cos()
    for w in WEIGHTS[:3]:
        made = x @ w
        one, other = made.chunk(2, -1)
        turned = torch.cat((-other, one, other, one), -1) * cosines
        gates = x @ WEIGHTS[3]
        seen = gates.view(4, -1, WIDTH).transpose(0, 1).sin().mean()
        x = x + (turned.sin() * torch.cat((gates, -gates), -1).sigmoid() + seen)[:, ::2]
    return x


def shape_of(function: Callable[..., Tensor], x: Tensor, policy: Policy) -> Shape:
    """What is known of the function's forwards."""
    found = known_of(policy).repeats._shape(subject_of(function), habits_of(function), (x,))
    assert found is not None
    return found


def replays(function: Callable[..., Tensor], x: Tensor, policy: Policy) -> int:
    """How many operators backward runs."""
    out = run(function, x, policy=policy).sum()
    with Counts() as counts:
        out.backward()
    return sum(counts.ops.values())


class Leaving:
    """A function whose next forward leaves its steps."""

    def __init__(self, function: Callable[..., Tensor], x: Tensor, policy: Policy) -> None:
        for _ in range(3):
            assert is_plain(function, x, policy=policy)
        self.shape = shape_of(function, x, policy)
        assert self.shape.followed == 1
        assert self.shape.steps is not None
        self.steps, self.heeds, self.notes = self.shape.steps, self.shape.heeds, self.shape.notes

    def leave(self, at: int) -> None:
        """Have it leave at this position."""
        self.shape.steps, self.shape.left = (*self.steps[:at], END), 0
        self.shape.heeds, self.shape.notes = self.heeds, self.notes

    def decide(self) -> None:
        """Have it decide for itself."""
        self.shape.steps, self.shape.left = None, 3


@pytest.mark.filterwarnings("ignore::sac_policies.UnmatchedEntryWarning")
@pytest.mark.parametrize(
    ("function", "policy"),
    [
        *((each, ALL) for each in (llama, gpt, written, in_views)),
        *((each, PRODUCTS) for each in (llama, written, _turned, waiting)),
    ],
)
def test_forward_that_leaves_keeps_what_others_keep(
    function: Callable[..., Tensor], policy: Policy
) -> None:
    """At each position: bytes, operators of backward, and gradients bit by bit."""
    x = leaf(ROWS, WIDTH)
    leaving = Leaving(function, x, policy)
    leaving.decide()
    most, longest = bytes_kept(function, x, policy=policy), replays(function, x, policy)
    for at in range(len(leaving.steps) - 1):
        leaving.leave(at)
        assert bytes_kept(function, x, policy=policy) <= 1.05 * most
        assert leaving.shape.steps is None
        leaving.leave(at)
        assert replays(function, x, policy) <= longest
        leaving.leave(at)
        assert is_plain(function, x, policy=policy)


def test_value_that_needs_a_copy_is_kept() -> None:
    """Nobody copied the norm's scale, which is written to past autograd before backward."""
    x, scale, more = leaf(ROWS, WIDTH), leaf(WIDTH), [False]

    def function(y: Tensor) -> Tensor:
        made = F.layer_norm(y, (WIDTH,), scale, BIAS)
        return made.sin() * 2.0 if more[0] else made + 1.0

    Leaving(function, x, ALL)
    more[0] = True
    grads = []
    for out in (function(x), run(function, x)):
        scale.data.mul_(2.0)
        grads.append(torch.autograd.grad(out.sum(), x)[0])
        scale.data.mul_(0.5)
    assert torch.equal(*grads)


def test_what_was_written_to_is_not_what_its_node_made() -> None:
    """It is kept, and no replay reads it."""
    entries = known_of(ALL).tables.anywhere
    values = FollowedValues(entries, reader(ALL), 0, ())
    made = leaf(ROWS, WIDTH).sin().detach()
    node = leaf(ROWS, WIDTH).sin().grad_fn
    note = Note(1, 0, False, False, False, False)
    for version in (0, 1):
        rest = Rest(entries, (), values, Habit.NONE)
        rest.take([note], [(node, 0, (made, version, type(node)))], [])
        assert rest.edges.is_held(node, 0) is (version == 0)


def test_nothing_of_a_forward_that_left_lives_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """What decided the rest goes with the graph."""
    x, rests = leaf(ROWS, WIDTH), []
    leaving = Leaving(llama, x, ALL)
    leaving.leave(9)
    take = Rest.take

    def noted(self: Rest, *given: Any) -> None:
        rests.append(weakref.ref(self))
        take(self, *given)

    monkeypatch.setattr(Rest, "take", noted)
    gc.collect()
    gc.disable()
    try:
        out = run(llama, x, policy=ALL)
        assert rests
        del out
        assert rests[0]() is None
    finally:
        gc.enable()


def test_what_is_kept_and_then_written_to_leaves_nothing_behind() -> None:
    """Held as it is, it would hold what was made of it, a cycle without a collector.

    Its backward would raise, so nobody runs it and nothing is dropped there.
    """

    class Marker:
        pass

    x, v = leaf(8, 8), leaf(8, 8)
    alive: list[weakref.ref[Any]] = []

    def function(x: Tensor) -> Tensor:
        y = x @ v
        made = y @ v  # its node saves y
        marker = Marker()
        alive.append(weakref.ref(marker))
        made.grad_fn.metadata["marker"] = marker
        y.add_(made)
        return x @ v

    for _ in range(4):
        run(function, x, policy=PRODUCTS)
    gc.collect()
    assert shape_of(function, x, PRODUCTS).followed == 2
    assert [each() for each in alive] == [None] * 4
