"""Tiles of matrices, that share a scale each: how many a piece of a parameter has.

Rule 1: tiles are those of the last two dimensions, counted from the first row and column; the last
        ones of a matrix may have fewer rows or columns.
Rule 2: a piece begins and ends between rows of tiles, or between matrices where these end in tiles
        of fewer rows (Rule 2 of `_boundary`). So its tiles are whole ones of the parameter.
Rule 3: tiles of one row may be cut between columns, too, where all are of one size.
"""

from __future__ import annotations

import math

Tile = tuple[int, int]


def matrices_in(shape: tuple[int, ...], tile: Tile, numel: int) -> tuple[int, int, int]:
    """How many matrices a piece of a parameter is, with their rows and columns.

    Several that end in whole tiles are one with all their rows; what Rule 3 is about has a tile in
    each row.

    Args:
        shape: of the parameter, at least two dimensions.
        tile: rows and columns.
        numel: elements of the piece.

    Example:
        >>> matrices_in((3, 6, 4), (4, 4), 48), matrices_in((3, 8, 4), (4, 4), 48)
        ((2, 6, 4), (1, 12, 4))
    """
    rows, columns = shape[-2:]
    if tile[0] == 1 and columns % tile[1] == 0:
        return 1, numel // tile[1], tile[1]
    if math.prod(shape[:-2]) == 1 or rows % tile[0] == 0:
        return 1, numel // max(1, columns), columns
    return numel // max(1, rows * columns), rows, columns


def grid_of(rows: int, columns: int, tile: Tile) -> tuple[int, int]:
    """Rows and columns of tiles that a matrix has.

    Example:
        >>> grid_of(300, 128, (128, 128))
        (3, 1)
    """
    return -(-rows // tile[0]), -(-columns // tile[1])


def tiles_in(shape: tuple[int, ...], tile: Tile, numel: int) -> int:
    """How many tiles a piece of a parameter has; arguments as in `matrices_in`."""
    count, rows, columns = matrices_in(shape, tile, numel)
    return count * math.prod(grid_of(rows, columns, tile))
