"""Cuts beside every way to cut, on small buffers, and within their bound on large ones."""

from __future__ import annotations

from bisect import bisect_right
from itertools import combinations_with_replacement, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flat_param import Blocks
from flat_param.layout import _cuts
from flat_param.plan import FlatLayout, ParamSpec, ShardPlan, plan_layout, plan_shard

BOUNDARIES = ["row", "tensor", Blocks(3), Blocks((2, 2)), Blocks((2,))]


@st.composite
def layouts(draw: Any, sizes: Any, most: int) -> FlatLayout:
    """Vectors, matrices and stacks of them, with gaps between them or without."""
    shapes = draw(st.lists(st.lists(sizes, min_size=1, max_size=3), min_size=1, max_size=most))
    specs = [ParamSpec(str(i), tuple(shape), torch.float32) for i, shape in enumerate(shapes)]
    return plan_layout(specs, align_bytes=draw(st.sampled_from([4, 16])))


def _places(plan: ShardPlan) -> list[int]:
    """Every place where a range may begin: between atoms, and at both ends of a parameter."""
    found = {0, plan.layout.numel}
    for (start, stop), cut in zip(plan.layout.ranges, plan.cuts, strict=True):
        found |= {stop, *range(start, stop, cut.atom_numel)}
    return sorted(found)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(layouts(st.integers(0, 4), 3), st.integers(1, 4), st.sampled_from(BOUNDARIES))
def test_longest_range_is_the_shortest_of_all_ways_to_cut(
    layout: FlatLayout, world: int, boundary: Any
) -> None:
    """Tried one by one: any places, in order, the same place more than once."""
    plan = plan_shard(layout, world_size=world, boundary=boundary)
    places = _places(plan)
    ways = combinations_with_replacement(places, world - 1)
    best = min(max(b - a for a, b in pairwise([0, *cuts, layout.numel])) for cuts in ways)
    assert plan.shard_numel == best
    assert {edge for pair in plan.ranges for edge in pair} <= set(places)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(layouts(st.integers(1, 300), 12), st.integers(1, 5000), st.sampled_from(BOUNDARIES))
def test_longest_range_is_within_an_atom_of_the_mean(
    layout: FlatLayout, world: int, boundary: Any
) -> None:
    """On large buffers, where not every way can be tried; ranges cover the buffer."""
    plan = plan_shard(layout, world_size=world, boundary=boundary)
    largest = max(cut.atom_numel for cut in plan.cuts) + layout.align_numel - 1
    assert len(plan.ranges) == world
    assert (plan.ranges[0][0], plan.ranges[-1][1]) == (0, layout.numel)
    assert all(a[1] == b[0] for a, b in pairwise(plan.ranges))
    assert plan.shard_numel < -(-layout.numel // world) + largest


@pytest.mark.parametrize("boundary", ["row", Blocks(32), Blocks((128, 128))])
def test_what_it_costs_does_not_grow_with_ranks(
    boundary: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looks at a buffer of one matrix, counted: 16,384 ranks need no more than 64 do."""
    layout = plan_layout([ParamSpec("w", (1 << 21, 128), torch.float32)])
    looks: list[int] = []

    def counted(*args: Any) -> int:
        looks[-1] += 1
        return bisect_right(*args)

    monkeypatch.setattr(_cuts, "bisect_right", counted)
    for world in (64, 16384):
        looks.append(0)
        assert plan_shard(layout, world_size=world, boundary=boundary).imbalance_frac == 0
    assert looks[1] <= 1.1 * looks[0], looks
