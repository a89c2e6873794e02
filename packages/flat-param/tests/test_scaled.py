"""What `Scaled` takes and refuses, and where blocks lie on ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flat_param import (
    Blocks,
    LayoutError,
    MixedPrecision,
    ParamSpec,
    Scaled,
    by_name,
    plan_layout,
    plan_segments,
    plan_shard,
)
from flat_param.layout._boundary_rules import resolve

F32, E4M3 = torch.float32, torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"dtype": torch.int8}, "dtype is torch.int8, but it must be one of torch.float8_e4m3fn, "),
        (
            {"dtype": torch.bfloat16},
            "dtype is torch.bfloat16, but it must .* or param_dtype of MixedPrecision for",
        ),
        ({"dtype": "fp8"}, "dtype is 'fp8', but"),
        ({"scale_dtype": torch.float16}, "scale_dtype is torch.float16, but it must be one of"),
        (
            {"block": 0},
            "block is 0, but a scale is for at least one element. Use 32, or \\(128, 128\\)",
        ),
        ({"block": -4}, "block is -4, but"),
        ({"block": 2.0}, "block is 2.0, but"),
        ({"block": "32"}, "block is '32', but a scale is for at least one element"),
        ({"block": (128,)}, r"block is \(128,\), but a tile has rows and columns, at least one of"),
        ({"block": (2, 2, 2)}, r"block is \(2, 2, 2\), but a tile has rows and columns"),
        ({"block": (128, 0)}, r"block is \(128, 0\), but .* Use \(128, 128\), or a number for"),
        ({"block": (128, True)}, r"block is \(128, True\), but a tile"),
        ({"block": (8, 8), "min_dims": 0}, r"min_dims is 0, but tiles of \(8, 8\) are of matrices"),
        ({"block": True}, "block is True, but"),
        ({"min_dims": -1}, "min_dims is -1, but dimensions are counted. Use 2, or 0 for all"),
        ({"min_dims": None}, "min_dims is None, but"),
    ],
)
def test_bad_settings_are_layout_errors(given: dict[str, Any], words: str) -> None:
    """The field, what it was, the rule, and what to pass."""
    with pytest.raises(LayoutError, match=f"flat_param.Scaled: {words}"):
        Scaled(**given)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (ParamSpec("w", (4, 4), F32), True),
        (ParamSpec("w", (4, 4), torch.float64), True),
        (ParamSpec("w", (4, 4), torch.bfloat16, requires_grad=False), True),
        (ParamSpec("w", (4,), F32), False),
        (ParamSpec("w", (), F32), False),
        (ParamSpec("w", (4, 4), E4M3), False),
        (ParamSpec("w", (4, 4), torch.int32), False),
        (ParamSpec("w", (4, 4), torch.bool), False),
        (ParamSpec("w", (4, 4), torch.complex64), False),
    ],
)
def test_wide_matrices_are_taken(spec: ParamSpec, expected: bool) -> None:
    """Whether trained or not; nothing that is float8 already, or no floating-point number."""
    assert Scaled().takes(spec) is expected


def test_every_wide_parameter_is_taken_where_dimensions_do_not_count() -> None:
    """A scalar has none."""
    assert Scaled(min_dims=0).takes(ParamSpec("w", (), F32))
    assert not Scaled(min_dims=3).takes(ParamSpec("w", (4, 4), F32))


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        (Scaled(), 3 * 33),
        (Scaled(block=128), 3 * 129),
        (Scaled(block=(128, 128), scale_dtype=F32), 3 * (128 * 128 + 4)),
        (Scaled(torch.float8_e5m2, block=128, scale_dtype=F32), 3 * 132),
    ],
)
def test_a_message_is_values_and_scales(how: Scaled, expected: int) -> None:
    """One byte an element, and one or four a block."""
    assert how.message_bytes(3) == expected


def test_tiles_are_of_matrices_that_lie_row_by_row() -> None:
    """Others are sent in the computing dtype."""
    how = Scaled(block=[2, 2])  # type: ignore[arg-type]  # as read from a file
    assert how == Scaled(block=(2, 2))
    assert how.takes(ParamSpec("w", (3, 4, 4), F32))
    assert not how.takes(ParamSpec("w", (4, 4), F32, (1, 4)))
    assert Scaled().takes(ParamSpec("w", (4, 4), F32, (1, 4)))


def test_a_unit_has_a_segment_for_each_way_to_send() -> None:
    """In the order of their first parameters; only blocks are aligned to blocks."""
    specs = [
        ParamSpec("a.weight", (5, 7), F32),
        ParamSpec("a.bias", (5,), F32),
        ParamSpec("b.weight", (2, 3), F32, requires_grad=False),
        ParamSpec("c.weight", (3, 11), F32),
    ]
    segments = plan_segments(specs, scaled=Scaled(block=32))
    assert [segment.name for segment in segments] == [
        "float32.scaled",
        "float32",
        "float32.scaled.frozen",
    ]
    assert [segment.scaled for segment in segments] == [Scaled(), None, Scaled()]
    assert [segment.layout.offsets for segment in segments] == [(0, 64), (0,), (0,)]
    assert [segment.layout.numel for segment in segments] == [128, 8, 32]


@pytest.mark.parametrize(("block", "offset"), [(1, 8), (3, 12), (6, 12), (32, 32)])
def test_parameters_start_at_blocks_and_at_16_bytes(block: int, offset: int) -> None:
    """At multiples of both, whatever the block is."""
    specs = [ParamSpec("a", (5,), F32), ParamSpec("b", (1,), F32)]
    layout = plan_layout(specs, block=block)
    assert (layout.offsets, layout.block_numel) == ((0, offset), block)
    assert layout.numel % block == 0


BOUNDARIES = ("element", "row", "tensor", Blocks(3), Blocks((2, 2)), "mixed")


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=6),
    st.integers(1, 12),
    st.integers(1, 9),
    st.sampled_from(BOUNDARIES),
)
def test_no_block_is_on_two_ranks(
    shapes: list[tuple[int, ...]], block: int, world: int, boundary: Any
) -> None:
    """Ranks have all blocks, each once; what one has of a parameter begins and ends with a block.

    Found from the pieces alone, which know nothing of blocks.
    """
    specs = [ParamSpec(f"p{i}", shape, F32) for i, shape in enumerate(shapes)]
    if boundary == "mixed":
        boundary = resolve(by_name({"p0": "element"}, default="row"), specs, None)
    plan = plan_shard(plan_layout(specs, block=block), world_size=world, boundary=boundary)
    for rank in range(world):
        first, end = plan.blocks[rank]
        held: set[int] = set()
        for part in plan.parts(rank):
            numel, offset = specs[part.index].numel, plan.layout.offsets[part.index]
            assert part.start % block == 0
            assert part.stop % block == 0 or part.stop == numel
            held |= {(offset + i) // block for i in range(part.start, part.stop)}
        assert held <= set(range(first, end))
    ends = [0, *(end for _, end in plan.blocks)]
    assert [first for first, _ in plan.blocks] == ends[:-1]
    assert ends[-1] * block == plan.numel
    assert plan.most_blocks == max(end - first for first, end in plan.blocks)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.lists(
        st.lists(st.integers(0, 9), min_size=2, max_size=3).map(tuple), min_size=1, max_size=4
    ),
    st.tuples(st.integers(1, 5), st.integers(1, 5)),
    st.integers(1, 9),
    st.sampled_from(BOUNDARIES),
)
def test_no_tile_is_on_two_ranks(
    shapes: list[tuple[int, ...]], tile: tuple[int, int], world: int, boundary: Any
) -> None:
    """Each element's tile is found from its indices, and its rank from the pieces.

    A message has room for as many as the rank with most of them has.
    """
    specs = [ParamSpec(f"p{i}", shape, F32) for i, shape in enumerate(shapes)]
    if boundary == "mixed":
        boundary = resolve(by_name({"p0": "element"}, default="row"), specs, None)
    plan = plan_shard(plan_layout(specs, block=tile), world_size=world, boundary=boundary)
    held: list[set[tuple[int, ...]]] = []
    for rank in range(world):
        own: set[tuple[int, ...]] = set()
        for part in plan.parts(rank):
            *_, rows, columns = specs[part.index].shape
            for element in range(part.start, part.stop):
                row, column = element // columns % rows, element % columns
                matrix = element // columns // rows
                own.add((part.index, matrix, row // tile[0], column // tile[1]))
        held.append(own)
    assert sum(map(len, held)) == len(set().union(*held))
    assert plan.most_sent == (plan.shard_numel, max(map(len, held)))


def test_tiles_move_ranges_to_their_rows() -> None:
    """Of 300 rows two ranks have 128 and 172, and 150 each where nothing is scaled."""
    spec, tile = ParamSpec("w", (300, 64), F32), (128, 128)
    for block, expected in ((1, (150, 300)), (tile, (128, 300))):
        plan = plan_shard(plan_layout([spec], block=block), world_size=2)
        assert tuple(stop // 64 for _, stop in plan.ranges) == expected
    assert plan.boundary == Blocks(tile)
    assert round(plan.imbalance_frac, 2) == 0.15


def test_a_policy_says_how_parameters_are_sent() -> None:
    """What is compared between ranks has it, and no gradient's dtype changes."""
    precision = MixedPrecision(gather=Scaled(block=64))
    assert "block=64" in str(precision)
    assert precision.reduction_dtype(F32) == F32
