"""A mixed step is predicted from steps on single levels."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from sac_policies.budget._fit_in_place import _divisions, _Search
from sac_policies.budget._intervals import Steps, marked
from sac_policies.budget._measure import Interval, Marks, highest
from sac_policies.budget._repeating import Calls
from sac_policies.budget._step import Step

from ._blocks import Block, Stack, stack
from ._fitted import own_forwards

CPU = torch.device("cpu")
ROWS = torch.linspace(-1, 1, 512 * 8).view(512, 8)


def keys_of(model: nn.Module, regions: list[nn.Module], run: Any) -> list[Any]:
    """Marks in the order in which a step reaches them."""
    marks = Marks(CPU)
    with marked(regions, marks):
        found = marks.intervals(run)
    assert own_forwards(model) == []
    return [each.key for each in found]


def test_a_step_is_divided_where_regions_begin() -> None:
    """In forward, and in backward from last to first; work between regions belongs to none."""
    model = stack(2)
    keys = keys_of(model, list(model.blocks), lambda: model(ROWS)["scores"].sum().backward())
    begun = [None, (0, 0, False), (0, 0, None), (1, 0, False), (1, 0, None)]
    assert keys == [*begun, (1, 0, True), (0, 0, True)]


def test_a_region_that_is_called_again_is_told_by_its_calls() -> None:
    """Each call is a separate region; a call without a gradient has no backward."""
    block = Block()
    x = torch.ones(4, 24)
    keys = keys_of(block, [block], lambda: block(block(x)).sum().backward())
    begun = [None, (0, 0, False), (0, 0, None), (0, 1, False), (0, 1, None)]
    assert keys == [*begun, (0, 1, True), (0, 0, True)]

    def without() -> None:
        with torch.no_grad():
            block(x)

    assert keys_of(block, [block], without) == [None, (0, 0, False), (0, 0, None)]


def test_several_outputs_begin_backward_once() -> None:
    """Backward begins with the first gradient that is computed."""

    class Two(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x.sin(), x.cos()

    two, x = Two(), torch.ones(3, requires_grad=True)

    def step() -> None:
        a, b = two(x)
        (a + b).sum().backward()

    assert keys_of(two, [two], step) == [None, (0, 0, False), (0, 0, None), (0, 0, True)]


def _search(model: nn.Module, step: Step) -> _Search:
    """A search over the outermost blocks."""
    with Calls(model) as calls:
        step.run()
    return _Search(model, step, next(iter(_divisions(model, step, calls))), calls)


@pytest.mark.parametrize("kind", [Stack, nn.Sequential])
def test_every_mixture_takes_what_is_predicted(kind: Any) -> None:
    """Within 2 % of the measured peak, with dropout and running statistics."""
    torch.manual_seed(0)
    model: nn.Module
    if kind is Stack:
        model, batch = Stack(4), ROWS
    else:
        model, batch = (
            nn.Sequential(*(Block(24, nn.BatchNorm1d) for _ in range(4))),
            ROWS.repeat(1, 3),
        )
    step = Step(model, batch, None)
    with step.trials():
        search = _search(model, step)
        search._learn()
        intervals = [search._intervals((level,) * 4) for level in range(search._levels)]
        steps = Steps([Block] * 4, intervals)
        rng = random.Random(0)
        for _ in range(12):
            choice = tuple(rng.randrange(search._levels) for _ in range(4))
            resident = search._step.resident()
            measured = search._peak(search._intervals(choice))
            assert resident + steps.growth(choice) == pytest.approx(measured, rel=0.02)
        for level, each in enumerate(intervals):
            assert steps.growth((level,) * 4) == highest(each)
        search.undo()


class Remembering(Block):
    """A block that stores an intermediate in a cache, as attention does."""

    def forward(self, x: torch.Tensor, cache: list[torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
        """Apply it."""
        cache.append(self.up(x).sin())
        return x + self.down(cache[-1].tanh())


class Caching(Stack):
    """Also returns its cache, which is dropped if there is a loss."""

    def __init__(self, depth: int) -> None:
        super().__init__(depth)
        self.blocks = nn.ModuleList(Remembering() for _ in range(depth))

    def forward(self, x: torch.Tensor, **_: Any) -> dict[str, Any]:
        """Return scores and the cache's contents."""
        x, cache = self.first(x), []
        for block in self.blocks:
            x = block(x, cache)
        return {"scores": self.head(x), "cache": cache}


def test_what_others_hold_until_the_end_goes_by_the_region_that_made_it() -> None:
    """Cached keys and values count for the region that made them."""
    torch.manual_seed(0)

    def loss(out: dict[str, Any]) -> torch.Tensor:
        return out["scores"].square().sum()

    step = Step(model := Caching(4), ROWS, loss)
    with step.trials():
        search = _search(model, step)
        levels = range(search._levels)
        search._learn()
        intervals = [search._intervals((level,) * 4) for level in levels]
        steps = Steps([Block] * 4, intervals)
        for choice in [(0, 0, 0, 2), (1, 1, 1, 0), (2, 2, 1, 0), (0, 2, 0, 1)]:
            measured = search._peak(search._intervals(choice))
            foretold = search._step.resident() + steps.growth(choice)
            assert foretold == pytest.approx(measured, rel=0.02)
        search.undo()


@st.composite
def synthetic(draw: st.DrawFn) -> tuple[Steps, int]:
    """Steps of a few regions on a few levels; backward always leaves the same bytes."""
    count, levels = draw(st.integers(1, 4)), draw(st.integers(2, 3))
    size = st.integers(0, 20)
    head = Interval(None, draw(size), draw(size))
    leaves = [draw(size) for _ in range(count)]
    measured = []
    for _ in range(levels):
        kept = [draw(size) for _ in range(count)]
        first = [Interval((n, 0, False), kept[n], kept[n] + draw(size)) for n in range(count)]
        last = [Interval((n, 0, True), leaves[n] - kept[n], draw(size)) for n in range(count)]
        last = [Interval(s.key, s.grown, max(s.most, s.grown, 0)) for s in last]
        last = [replace(each, ns=1000 * draw(size)) for each in last]
        head = Interval(None, head.grown, max(head.most, head.grown))
        measured.append([head, *first, *reversed(last)])
    return Steps(range(count), measured), levels


@settings(max_examples=300, deadline=None)
@given(synthetic(), st.integers(0, 200))
def test_what_is_chosen_is_the_cheapest_that_fits(made: tuple[Steps, int], allowed: int) -> None:
    """Compared with a search over all choices."""
    steps, levels = made
    count = len(steps.costs)
    choices = list(itertools.product(range(levels), repeat=count))
    fitting = [choice for choice in choices if steps.growth(choice) <= allowed]
    found = steps.choose(allowed)
    if not fitting:
        assert found is None
        return
    assert found is not None

    def cost(choice: tuple[int, ...]) -> int:
        return sum(own[level] for own, level in zip(steps.costs, choice, strict=True))

    assert steps.growth(found) <= allowed
    assert cost(found) == min(map(cost, fitting))


@settings(max_examples=200, deadline=None)
@given(synthetic())
def test_least_is_the_least_of_all(made: tuple[Steps, int]) -> None:
    """Compared with a search over all choices."""
    steps, levels = made
    choices = itertools.product(range(levels), repeat=len(steps.costs))
    assert steps.growth(steps.least()) == min(map(steps.growth, choices))


def test_times_of_regions_alike_are_taken_together() -> None:
    """One slow measurement does not make its region dearer; costs are at least zero."""
    first = [Interval((n, 0, False), 8, 8) for n in range(3)]
    last = [Interval((n, 0, True), -8, 0) for n in range(3)]
    plain = [Interval(None, 0, 0), *first, *reversed(last)]
    ns = {(0, 0, True): 9_000, (1, 0, True): 1_000, (2, 0, True): 1_000}
    slow = [replace(each, ns=ns.get(each.key, 0)) for each in plain]
    assert Steps(["a"] * 3, [plain, slow]).costs == [[0, 1_001]] * 3
    apart = Steps(["a", "b", "b"], [plain, slow])
    assert apart.costs == [[0, 9_001], [0, 1_001], [0, 1_001]]
    assert Steps(["a"] * 3, [slow, plain]).costs == [[0, 1]] * 3
