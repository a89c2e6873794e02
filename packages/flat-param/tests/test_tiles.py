"""How many tiles a piece of a parameter has, against counting them element by element."""

from __future__ import annotations

import itertools

import pytest

from flat_param.layout._tiles import grid_of, matrices_in, tiles_in


def counted(shape: tuple[int, ...], tile: tuple[int, int]) -> int:
    """Tiles that the elements of a whole parameter are in."""
    indices = itertools.product(*map(range, shape))
    return len({(*at[:-2], at[-2] // tile[0], at[-1] // tile[1]) for at in indices})


@pytest.mark.parametrize("tile", [(1, 4), (4, 4), (3, 2), (5, 7)])
@pytest.mark.parametrize("shape", [(8, 4), (7, 5), (1, 1), (3, 6, 4), (2, 8, 4), (2, 2, 3, 3)])
def test_a_whole_parameter_has_the_tiles_of_its_elements(
    shape: tuple[int, ...], tile: tuple[int, int]
) -> None:
    """Those at the last rows and columns too, which are smaller."""
    numel = 1
    for size in shape:
        numel *= size
    assert tiles_in(shape, tile, numel) == counted(shape, tile)


def test_pieces_between_rows_of_tiles_have_them_all() -> None:
    """Of one matrix, and of several: no tile is counted twice."""
    assert sum(tiles_in((10, 6), (4, 4), rows * 6) for rows in (4, 4, 2)) == counted(
        (10, 6), (4, 4)
    )
    one, both = tiles_in((2, 6, 4), (4, 4), 24), tiles_in((2, 6, 4), (4, 4), 48)
    assert 2 * one == both == counted((2, 6, 4), (4, 4))


def test_an_empty_piece_has_none() -> None:
    """What a rank that holds nothing of a parameter has."""
    assert tiles_in((8, 4), (4, 4), 0) == 0
    assert grid_of(0, 4, (4, 4)) == (0, 1)
    assert matrices_in((3, 6, 4), (4, 4), 0) == (0, 6, 4)
