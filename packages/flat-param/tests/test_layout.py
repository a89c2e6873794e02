"""Where parameters lie in a buffer, and where ranks divide it."""

from __future__ import annotations

import math
from itertools import combinations_with_replacement, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from flat_param import Blocks, LayoutError
from flat_param.plan import (
    FlatLayout,
    ParamSpec,
    ShardPlan,
    collect_params,
    plan_layout,
    plan_segments,
    plan_shard,
)

FEW = settings(max_examples=40, deadline=None, derandomize=True)
MANY = settings(max_examples=200, deadline=None, derandomize=True)
SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.complex64])
BOUNDARIES = ("element", "row", "tensor", Blocks(3), Blocks((2, 2)), Blocks((2,)))


def _spec(name: str, *shape: int, **options: Any) -> ParamSpec:
    return ParamSpec(name, shape, options.pop("dtype", torch.float32), **options)


@st.composite
def layouts(draw: Any, shapes: Any = SHAPES, most: int = 6) -> FlatLayout:
    """Some parameters of one dtype, at some alignment."""
    dtype = draw(DTYPES)
    chosen = draw(st.lists(shapes, min_size=1, max_size=most))
    specs = [_spec(str(index), *shape, dtype=dtype) for index, shape in enumerate(chosen)]
    return plan_layout(specs, align_bytes=draw(st.sampled_from([1, 16, 128])))


def test_plan_layout_aligns_every_start() -> None:
    """21 + (3) + 35 + (1) + 25 elements, at 16 bytes of float32, end rounded to 88."""
    layout = plan_layout([_spec("a", 7, 3), _spec("b", 5, 7), _spec("c", 5, 5)])
    assert layout.offsets == (0, 24, 60)
    assert layout.gaps == ((21, 24), (59, 60), (85, 88))
    assert layout.numel == 88
    assert layout.pieces == ((21, 0), (3, -1), (35, 1), (1, -1), (25, 2), (3, -1))


def test_plan_layout_at_one_byte_leaves_no_gap() -> None:
    """With `align_bytes=1` the buffer is the parameters and nothing else."""
    layout = plan_layout([_spec("a", 7, 3), _spec("b", 5)], align_bytes=1)
    assert (layout.numel, layout.gaps) == (26, ())


@FEW
@given(layouts())
def test_parameters_and_gaps_partition_the_buffer(layout: FlatLayout) -> None:
    """Every element is in exactly one parameter or one gap, and starts are aligned."""
    owned = sorted((*layout.ranges, *layout.gaps))
    seen = [element for start, stop in owned for element in range(start, stop)]
    assert seen == list(range(layout.numel))
    assert all(offset % layout.align_numel == 0 for offset in layout.offsets)


def test_plan_segments_groups_by_dtype_and_trainability() -> None:
    """Every (dtype, trainable) pair is one segment, in order of first appearance."""
    half = torch.bfloat16
    specs = [
        _spec("a", 2),
        _spec("b", 2, dtype=half),
        _spec("c", 2, requires_grad=False),
        _spec("d", 2, dtype=half),
    ]
    segments = plan_segments(specs)
    assert [segment.name for segment in segments] == ["float32", "bfloat16", "float32.frozen"]
    assert [s.name for s in segments[1].layout.specs] == ["b", "d"]
    assert [segment.trainable for segment in segments] == [True, True, False]


def test_collect_params_lists_a_tied_parameter_once() -> None:
    """With all of its names; ignored ones are left out."""
    model = nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 4))
    model[1].weight = model[0].weight
    specs, params = collect_params(model, ignored=[model[1].bias])
    assert [spec.names for spec in specs] == [("0.weight", "1.weight")]
    assert params[0] is model[0].weight


@FEW
@given(layouts(), st.integers(1, 9), st.sampled_from(BOUNDARIES))
def test_shards_partition_the_buffer(layout: FlatLayout, world_size: int, boundary: Any) -> None:
    """Ranges are contiguous; each element of each parameter is on exactly one rank.

    By element they are equal and aligned. There may be more ranks than elements.
    """
    plan = plan_shard(layout, world_size=world_size, boundary=boundary)
    edges = [edge for pair in plan.ranges for edge in pair]
    assert edges[0] == 0
    assert edges[1:-1:2] == edges[2::2]
    assert plan.numel >= layout.numel
    if boundary == "element":
        assert plan.even
        assert all(start % layout.align_numel == 0 for start, _ in plan.ranges)
    for rank, (start, stop) in enumerate(plan.ranges):
        for index, offset in enumerate(layout.offsets):
            first, last = plan.held(index, rank)
            assert first == last == 0 or start <= offset + first < offset + last <= stop
    for index, spec in enumerate(layout.specs):
        held = [plan.held(index, rank) for rank in range(world_size)]
        assert sum(last - first for first, last in held) == spec.numel


@pytest.mark.parametrize(
    ("shape", "boundary", "atom", "is_whole"),
    [
        ((6, 4), "element", 1, False),
        ((6, 4), "row", 4, False),
        ((6, 4), "tensor", 24, True),
        ((5,), "row", 1, False),
        ((), "row", 1, True),
        ((6, 4), Blocks(5), 5, False),
        ((6, 4), Blocks(24), 24, True),
        ((6, 4), Blocks((2, 2)), 8, False),
        ((6, 4), Blocks((4, 3)), 16, False),
        ((6, 4), Blocks((2,)), 2, False),
        ((6, 4), Blocks((3,)), 4, False),
        ((3, 6, 4), Blocks((2, 2)), 8, False),
        ((3, 6, 4), Blocks((4, 2)), 24, False),
        ((9,), Blocks((128, 2)), 2, False),
    ],
)
def test_this_many_elements_stay_together(
    shape: tuple[int, ...], boundary: Any, atom: int, is_whole: bool
) -> None:
    """Short blocks at the end of rows or matrices keep whole rows or matrices together."""
    plan = plan_shard(plan_layout([_spec("w", *shape)]), world_size=2, boundary=boundary)
    (cut,) = plan.cuts
    assert (cut.atom_numel, cut.whole) == (atom, is_whole)


@pytest.mark.parametrize("boundary", ["row", Blocks(2), Blocks((2, 2))])
def test_rows_that_are_scattered_in_memory_stay_together(boundary: Any) -> None:
    """A transposed matrix has no row or block that is whole in memory."""
    layout = plan_layout([_spec("w", 4, 3, stride=(1, 4))])
    (cut,) = plan_shard(layout, world_size=2, boundary=boundary).cuts
    assert (cut.atom_numel, cut.whole) == (12, True)


def _block_numbers(shape: tuple[int, ...], blocks: Blocks) -> list[Any]:
    """For each element in memory order, which block it is of."""
    if isinstance(blocks.shape, int):
        return [index // blocks.shape for index in range(math.prod(shape))]
    tile = (1,) * (len(shape) - len(blocks.shape)) + blocks.shape[-len(shape) :]
    indices = torch.cartesian_prod(*(torch.arange(size) for size in shape)).view(-1, len(shape))
    return [tuple(i // t for i, t in zip(index, tile, strict=True)) for index in indices.tolist()]


@MANY
@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple),
    st.one_of(st.integers(1, 9), st.lists(st.integers(1, 4), min_size=1, max_size=2).map(tuple)),
)
def test_no_cut_goes_through_a_block(shape: tuple[int, ...], size: Any) -> None:
    """At no multiple of the atom; each block is found by its elements' indices."""
    blocks = Blocks(size)
    numbers = _block_numbers(shape, blocks)
    layout = plan_layout([_spec("w", *shape)])
    (cut,) = plan_shard(layout, world_size=2, boundary=blocks).cuts
    for position in range(cut.atom_numel, len(numbers), cut.atom_numel):
        assert set(numbers[:position]).isdisjoint(numbers[position:])


@pytest.mark.parametrize("shape", [0, -1, (), (2, 0), True, (2, 1.5), (True,), 1.5, None])
def test_blocks_of_nothing_are_refused(shape: Any) -> None:
    """By name, with what to pass."""
    with pytest.raises(LayoutError, match=r"flat_param.Blocks: shape is .* Pass 32, or"):
        Blocks(shape)


def test_blocks_are_values() -> None:
    """Ranks compare them as text."""
    assert (str(Blocks(32)), str(Blocks((128, 128)))) == ("Blocks(32)", "Blocks((128, 128))")
    assert Blocks((2, 2)) == Blocks((2, 2)) != Blocks(2)


def _places(plan: ShardPlan) -> list[int]:
    """Every place where a range may begin: between atoms, and at both ends of a parameter."""
    found = {0, plan.layout.numel}
    for (start, stop), cut in zip(plan.layout.ranges, plan.cuts, strict=True):
        found |= {stop, *range(start, stop, cut.atom_numel)}
    return sorted(found)


def _sizes(most: int) -> Any:
    return st.lists(st.integers(min(1, most // 100), most), min_size=1, max_size=3).map(tuple)


@MANY
@given(layouts(_sizes(4), 3), st.integers(1, 4), st.sampled_from(BOUNDARIES[1:]))
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


def test_a_405b_model_is_planned_for_16384_ranks() -> None:
    """A plan costs no memory per element, so any size can be planned anywhere."""
    shapes = [(16384, 16384), (1024, 16384), (53248, 16384), (16384, 53248)]
    specs = [_spec(f"{i}.{s}", *s, dtype=torch.bfloat16) for i in range(126) for s in shapes]
    plan = plan_shard(plan_layout(specs), world_size=16384, boundary="row")
    assert plan.numel == sum(spec.numel for spec in specs)
    assert plan.imbalance_frac < 0.01
