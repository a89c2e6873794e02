"""Optimizer state with a row for each block, from ranks to other numbers of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flat_param import Blocks
from flat_param.layout._boundary import numel_of_block
from flat_param.plan import ParamSpec, plan_layout, plan_shard
from flat_param.sharded._block_rows import BlockRows, block_rows


@pytest.mark.dist
def test_state_of_blocks_is_one_processs_on_any_ranks(
    ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    """Trained and saved on two, taken up on one and on three: every bit, then and later."""
    assert ranks(2, "block_state", str(tmp_path), "save", timeout_s=120) == ["save"] * 2
    for world in (1, 3):
        taken_up = ranks(world, "block_state", str(tmp_path), "resume", timeout_s=120)
        assert taken_up == ["resume"] * world


@pytest.mark.parametrize(
    ("shape", "boundary", "expected"),
    [
        ((6, 4), "element", 0),
        ((6, 4), "tensor", 0),
        ((6, 4), "row", 4),
        ((6, 4), Blocks(5), 5),
        ((6, 4), Blocks((4, 3)), 16),
        ((9,), Blocks((4, 3)), 3),
        ((0, 4), "row", 0),
    ],
)
def test_a_block_has_this_many_elements(
    shape: tuple[int, ...], boundary: Any, expected: int
) -> None:
    """Of tiles all that are beside each other; where nothing or everything is cut, none."""
    assert numel_of_block(shape, ParamSpec("w", shape, torch.float32).stride, boundary) == expected


@pytest.mark.parametrize("world", [1, 2, 3, 7])
@pytest.mark.parametrize("boundary", ["row", Blocks(5), Blocks((4, 3))])
def test_rows_of_ranks_are_those_of_the_parameter(boundary: Any, world: int) -> None:
    """In order and each once; also where ranks leave several blocks together."""
    specs = [ParamSpec("a", (9, 7), torch.float32), ParamSpec("b", (11,), torch.float32)]
    plan = plan_shard(plan_layout(specs), world_size=world, boundary=boundary)
    for index, spec in enumerate(specs):
        size = numel_of_block(spec.shape, spec.stride, boundary)
        held = [
            (part.start, part.stop, block_rows(plan, index, part.start, part.stop))
            for rank in range(world)
            for part in plan.parts(rank)
            if part.index == index
        ]
        if len(held) == 1:
            assert held[0][2] is None
            continue
        end = 0
        for start, stop, rows in held:
            assert rows is not None
            assert (rows.first, rows.total) == (end, -(-spec.numel // size))
            assert rows.first * size == start
            end = rows.first + rows.count
            assert end * size >= stop > (end - 1) * size
        assert end == -(-spec.numel // size)


def test_what_has_another_number_of_rows_is_no_state_of_blocks() -> None:
    """Nor is a count of steps, a number, or nothing."""
    rows = BlockRows(2, 3, 9)
    assert rows.fits_piece("scales", torch.ones(3))
    assert rows.fits_whole("codes", torch.ones(9, 32))
    for key, state in (
        ("scales", torch.ones(4)),
        ("scales", torch.ones(9)),
        ("scales", torch.ones(())),
        ("scales", torch.ones(3, 0)),
        ("scales", [1.0, 1.0, 1.0]),
        ("step", torch.ones(3)),
    ):
        assert not rows.fits_piece(key, state), (key, state)
