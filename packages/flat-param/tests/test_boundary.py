"""Where a parameter may be cut: derived by hand, and blocks that stay whole whatever the shape."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flat_param import Blocks, LayoutError
from flat_param.layout._boundary import Boundary, Cut, cut_of
from flat_param.plan import ParamSpec

CASES: list[tuple[tuple[int, ...], Boundary, Cut]] = [
    ((6, 4), "element", Cut(1, (), whole=False)),
    ((6, 4), "row", Cut(4, (4,), whole=False)),
    ((6, 4), "tensor", Cut(24, (4,), whole=True)),
    ((5,), "row", Cut(1, (), whole=False)),
    ((), "row", Cut(1, (), whole=True)),
    ((6, 4), Blocks(5), Cut(5, (), whole=False)),
    ((6, 4), Blocks(24), Cut(24, (4,), whole=True)),
    ((6, 4), Blocks((2, 2)), Cut(8, (4,), whole=False)),
    ((6, 4), Blocks((4, 3)), Cut(16, (4,), whole=False)),
    ((6, 4), Blocks((2,)), Cut(2, (), whole=False)),
    ((6, 4), Blocks((3,)), Cut(4, (4,), whole=False)),
    ((3, 6, 4), Blocks((2, 2)), Cut(8, (4,), whole=False)),
    ((3, 6, 4), Blocks((4, 2)), Cut(24, (6, 4), whole=False)),
    ((9,), Blocks((128, 2)), Cut(2, (), whole=False)),
    ((0, 4), Blocks(2), Cut(1, (4,), whole=True)),
]


@pytest.mark.parametrize(("shape", "boundary", "expected"), CASES)
def test_atoms_are_these(shape: tuple[int, ...], boundary: Boundary, expected: Cut) -> None:
    """Short blocks at the end of rows or matrices make whole rows or matrices the atoms."""
    assert cut_of(shape, ParamSpec("w", shape, torch.float32).stride, boundary) == expected


@pytest.mark.parametrize("boundary", ["row", Blocks(2), Blocks((2, 2))])
def test_rows_that_are_scattered_in_memory_stay_together(boundary: Boundary) -> None:
    """A transposed matrix has no row or block that is whole in memory."""
    assert cut_of((4, 3), (1, 4), boundary) == Cut(12, (3,), whole=True)


def _block_numbers(shape: tuple[int, ...], blocks: Blocks) -> list[Any]:
    """For each element in memory order, which block it is of."""
    if isinstance(blocks.shape, int):
        return [index // blocks.shape for index in range(math.prod(shape))]
    tile = (1,) * (len(shape) - len(blocks.shape)) + blocks.shape[-len(shape) :]
    indices = torch.cartesian_prod(*(torch.arange(size) for size in shape)).view(-1, len(shape))
    return [tuple(i // t for i, t in zip(index, tile, strict=True)) for index in indices.tolist()]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple),
    st.one_of(st.integers(1, 9), st.lists(st.integers(1, 4), min_size=1, max_size=2).map(tuple)),
)
def test_no_cut_goes_through_a_block(shape: tuple[int, ...], size: Any) -> None:
    """At no multiple of the atom; each block is found by its elements' indices."""
    blocks = Blocks(size)
    numbers = _block_numbers(shape, blocks)
    atom = cut_of(shape, ParamSpec("w", shape, torch.float32).stride, blocks).atom_numel
    for position in range(atom, len(numbers), atom):
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
