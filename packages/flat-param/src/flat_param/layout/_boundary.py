"""Where ranks may cut a parameter: between elements, rows, blocks, or nowhere.

- A parameter may be cut at multiples of its atom, counted from its first element in memory. The
  last atom may be shorter.
- Blocks of a piece are blocks of the whole parameter: if its rows or matrices end in a short block,
  whole rows or matrices are the atoms.
- A parameter that is not row-major has no blocks in memory and stays whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from .._errors import LayoutError


@dataclass(frozen=True)
class Blocks:
    """A boundary that keeps blocks of a parameter on one rank, as quantisers need them.

    Args:
        shape: in elements. A number: that many consecutive elements in memory, regardless of rows,
            as for 8-bit optimizers. A tuple: tiles of the last dimensions, (32,) for MXFP8,
            (128, 128) for fp8 weights; for a parameter with fewer dimensions, the last sizes are
            used.

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
        """Format the boundary as in code."""
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
        """The form that ranks compare."""
        return ", ".join(f"{name}: {boundary}" for name, boundary in self.choices)


Boundary: TypeAlias = Word | Blocks | PerParameter


def boundaries_of(boundary: Boundary, names: Sequence[str]) -> tuple[Word | Blocks, ...]:
    """The boundary of each of these parameters."""
    if not isinstance(boundary, PerParameter):
        return (boundary,) * len(names)
    of = dict(boundary.choices)
    return tuple(of[name] for name in names)


def check_boundary(boundary: object, *, where: str = "plan_shard") -> None:
    """Refuse an unknown boundary."""
    if not isinstance(boundary, (Blocks, PerParameter)) and boundary not in get_args(Word):
        raise LayoutError(
            f"flat_param.{where}: boundary is {boundary!r}, but it must be one of "
            f"{', '.join(get_args(Word))}, or Blocks. Use 'element' for elementwise optimizers."
        )


@dataclass(frozen=True)
class Cut:
    """How one parameter may be cut.

    Args:
        atom_numel: elements that stay together, at least 1.
        inner: sizes of the last dimensions, which stay whole; None if nothing does.
        whole: whether the parameter is never cut, and a rank has all of it or nothing.
    """

    atom_numel: int
    inner: tuple[int, ...] | None
    whole: bool


def cut_of(shape: tuple[int, ...], stride: tuple[int, ...], boundary: Word | Blocks) -> Cut:
    """How a parameter of dense `shape` and `stride` (elements) is cut at a boundary."""
    if boundary == "element":
        return Cut(1, None, whole=False)
    numel = math.prod(shape)
    atom, inner = _atom(shape, stride, boundary)
    atom = max(1, atom)
    if atom >= numel:
        return Cut(max(1, numel), shape[1:], whole=True)
    return Cut(atom, inner, whole=False)


def numel_of_block(shape: tuple[int, ...], stride: tuple[int, ...], boundary: Word | Blocks) -> int:
    """Elements of each row or block that a boundary keeps whole; 0 where it has none.

    For tiles, this is one row of tiles.
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
    if not is_row_major(shape, stride):
        return numel, shape[1:]
    assert isinstance(boundary, Blocks)
    if isinstance(boundary.shape, int):
        return boundary.shape, ()
    return _tile_atom(shape, boundary.shape)


def _tile_atom(shape: tuple[int, ...], tile: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """The atom is as many whole rows as a tile has."""
    tile = tile[-len(shape) :]
    first = len(shape) - len(tile)
    dim = next((first + i for i, size in enumerate(tile) if size > 1), len(shape) - 1)
    size, inner = tile[dim - first], shape[dim + 1 :]
    if dim and shape[dim] % size:
        return math.prod(shape[dim:]), shape[dim:]
    return size * math.prod(inner), inner


def is_row_major(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether a dense tensor is row-major."""
    step = 1
    for size, found in zip(reversed(shape), reversed(stride), strict=True):
        if size > 1 and found != step:
            return False
        step *= size
    return True
