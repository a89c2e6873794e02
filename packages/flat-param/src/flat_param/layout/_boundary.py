"""Where ranks may cut a parameter: between elements, rows, blocks, or nowhere.

Rule 1: a parameter may be cut at multiples of its atom, counted from its first element in memory,
        and at its ends. The last atom may be shorter.
Rule 2: blocks in a piece are those of the whole parameter: where the rows or matrices of a
        parameter end in a short block, whole rows or matrices are the atoms.
Rule 3: a parameter that does not lie row by row in memory has no blocks there, and stays whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from .._errors import LayoutError


@dataclass(frozen=True)
class Blocks:
    """A boundary that leaves blocks of a parameter whole on one rank, as quantisers need them.

    Args:
        shape: elements. A number: that many consecutive elements in memory, regardless of rows, as
            for 8-bit optimizers. A tuple: tiles of the last dimensions, (32,) for MXFP8, (128, 128)
            for fp8 weights; for a parameter with fewer dimensions, the last sizes are used.

    Raises:
        LayoutError: a size is below 1, or there is none.

    Example:
        >>> Blocks((128, 128)), str(Blocks(32))
        (Blocks(shape=(128, 128)), 'Blocks(32)')
    """

    shape: int | tuple[int, ...]

    def __post_init__(self) -> None:
        sizes = tuple(self.shape) if isinstance(self.shape, Iterable) else (self.shape,)
        if not sizes or any(type(size) is not int or size < 1 for size in sizes):
            raise LayoutError(
                f"flat_param.Blocks: shape is {self.shape!r}, but a block has at least one element "
                "along each dimension. Pass 32, or (128, 128)."
            )
        object.__setattr__(self, "shape", self.shape if type(self.shape) is int else sizes)

    def __str__(self) -> str:
        """As it is written in code."""
        return f"Blocks({self.shape})"


Word: TypeAlias = Literal["element", "row", "tensor"]


@dataclass(frozen=True)
class PerParameter:
    """A boundary for each parameter of a buffer, by name.

    Args:
        choices: name and boundary of each.
    """

    choices: tuple[tuple[str, Word | Blocks], ...]

    def __str__(self) -> str:
        """As it is compared between ranks."""
        return ", ".join(f"{name}: {boundary}" for name, boundary in self.choices)


Boundary: TypeAlias = Word | Blocks | PerParameter


def boundaries_of(boundary: Boundary, names: Sequence[str]) -> tuple[Word | Blocks, ...]:
    """The boundary of each of these parameters."""
    if not isinstance(boundary, PerParameter):
        return (boundary,) * len(names)
    of = dict(boundary.choices)
    return tuple(of[name] for name in names)


def check_boundary(boundary: object, *, where: str = "plan_shard") -> None:
    """Refuse what is no boundary.

    Raises:
        LayoutError: names it, and what there is.
    """
    if not isinstance(boundary, (Blocks, PerParameter)) and boundary not in get_args(Word):
        raise LayoutError(
            f"flat_param.{where}: boundary is {boundary!r}, but it must be one of "
            f"{', '.join(get_args(Word))}, or Blocks. Use 'element' for elementwise optimizers."
        )


@dataclass(frozen=True)
class Cut:
    """How one parameter may be cut.

    Args:
        atom_numel: elements that stay together (Rule 1), at least 1.
        inner: sizes of the last dimensions, which stay whole; none where elements are cut.
        whole: whether the parameter is never cut, and a rank has all of it or nothing.
    """

    atom_numel: int
    inner: tuple[int, ...]
    whole: bool


def cut_of(shape: tuple[int, ...], stride: tuple[int, ...], boundary: Word | Blocks) -> Cut:
    """How a parameter of dense `shape` and `stride` (elements) is cut at a boundary.

    Args:
        shape: sizes.
        stride: in elements.
        boundary: where it may be cut.

    Example:
        >>> cut_of((6, 4), (4, 1), "row")
        Cut(atom_numel=4, inner=(4,), whole=False)
        >>> cut_of((6, 4), (4, 1), Blocks((2, 2))).atom_numel, cut_of((6, 4), (4, 1), Blocks(3))
        (8, Cut(atom_numel=3, inner=(), whole=False))
    """
    if boundary == "element":
        return Cut(1, (), whole=False)
    numel = math.prod(shape)
    atom, inner = _atom(shape, stride, boundary)
    atom = max(1, atom)
    if atom >= numel:
        return Cut(max(1, numel), shape[1:], whole=True)
    return Cut(atom, inner, whole=False)


def numel_of_block(shape: tuple[int, ...], stride: tuple[int, ...], boundary: Word | Blocks) -> int:
    """Elements of each row or block that a boundary keeps whole; 0 where it has none.

    Of tiles it is a row of them.

    Example:
        >>> numel_of_block((6, 4), (4, 1), "row"), numel_of_block((6, 4), (4, 1), Blocks(5))
        (4, 5)
    """
    return 0 if boundary in ("element", "tensor") else _atom(shape, stride, boundary)[0]


def _atom(
    shape: tuple[int, ...], stride: tuple[int, ...], boundary: Word | Blocks
) -> tuple[int, tuple[int, ...]]:
    numel = math.prod(shape)
    if boundary == "tensor" or numel == 0 or not shape:
        return numel, shape[1:]
    if boundary == "row":
        row = numel // shape[0]
        return (row if shape[0] == 1 or stride[0] == row else numel), shape[1:]
    if not is_row_major(shape, stride):  # Rule 3
        return numel, shape[1:]
    assert isinstance(boundary, Blocks)
    if isinstance(boundary.shape, int):
        return boundary.shape, ()
    return _tile_atom(shape, boundary.shape)


def _tile_atom(shape: tuple[int, ...], tile: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """All rows of a tile are whole, so the atom is as many rows as the tile has (Rule 2)."""
    tile = tile[-len(shape) :]
    first = len(shape) - len(tile)
    dim = next((first + i for i, size in enumerate(tile) if size > 1), len(shape) - 1)
    size, inner = tile[dim - first], shape[dim + 1 :]
    if dim and shape[dim] % size:
        return math.prod(shape[dim:]), shape[dim:]
    return size * math.prod(inner), inner


def is_row_major(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether a dense tensor lies row by row in memory."""
    step = 1
    for size, found in zip(reversed(shape), reversed(stride), strict=True):
        if size > 1 and found != step:
            return False
        step *= size
    return True
