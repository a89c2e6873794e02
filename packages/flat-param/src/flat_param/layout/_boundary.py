"""Where ranks may cut a parameter: between elements, rows, blocks, or nowhere.

- A parameter may be cut at multiples of its atom, counted from its first element in memory. The
  last atom may be shorter.
- Blocks of a piece are blocks of the whole parameter: if its rows or matrices end in a short block,
  whole rows or matrices are the atoms.
- A parameter that is not row-major has no blocks in memory and stays whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, TypeAlias, get_args

from .._errors import LayoutError
from ._spec import ParamSpec, contiguous_stride


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
class BoundaryRules:
    """A boundary for each parameter; made by `by_name`.

    Attributes:
        rules: a glob of names, and the boundary of parameters that match.
        default: the boundary of other parameters.
        missing_ok: whether a rule may match no parameter.
    """

    rules: tuple[tuple[str, Word | Blocks], ...]
    default: Word | Blocks
    missing_ok: bool

    def __str__(self) -> str:
        """The form that ranks compare."""
        told = (f"{glob!r}: {boundary}" for glob, boundary in self.rules)
        return f"{{{', '.join(told)}}}, else {self.default}"


Boundary: TypeAlias = Word | Blocks | BoundaryRules


def by_name(
    rules: Mapping[str, Word | Blocks],
    *,
    default: Word | Blocks = "element",
    missing_ok: bool = False,
) -> BoundaryRules:
    """Choose the boundary of each parameter by its name.

    Args:
        rules: globs of names below the module that is sharded, and boundaries; the first that
            matches decides.
        default: for parameters that match no rule.
        missing_ok: whether a glob may match no parameter of the unit.

    Raises:
        LayoutError: a boundary is unknown, or a glob is not text.

    Example:
        >>> str(by_name({"*.experts.*": "tensor", "*.weight": Blocks(32)}))
        "{'*.experts.*': tensor, '*.weight': Blocks(32)}, else element"
    """
    if not isinstance(rules, Mapping) or not all(isinstance(glob, str) for glob in rules):
        raise LayoutError(
            f"flat_param.by_name: rules is {rules!r}, but it must be a mapping from globs of names "
            'to boundaries. Write for example {"*.weight": "tensor"}.'
        )
    for boundary in (*rules.values(), default):
        if isinstance(boundary, BoundaryRules):
            raise LayoutError("flat_param.by_name: a boundary is a result of by_name itself.")
        check_boundary(boundary, where="by_name")
    return BoundaryRules(tuple(rules.items()), default, missing_ok)


def check_boundary(boundary: object, *, where: str = "plan_shard") -> None:
    """Refuse an unknown boundary."""
    if not isinstance(boundary, (Blocks, BoundaryRules)) and boundary not in get_args(Word):
        raise LayoutError(
            f"flat_param.{where}: boundary is {boundary!r}, but it must be one of "
            f"{', '.join(get_args(Word))}, or Blocks, or what by_name returns. Use 'element' for "
            "elementwise optimizers."
        )


def check_rules(boundary: Boundary, specs: Sequence[ParamSpec]) -> None:
    """Refuse an unknown boundary, and rules that match no parameter of a unit."""
    check_boundary(boundary, where="fully_shard")
    if not isinstance(boundary, BoundaryRules) or boundary.missing_ok:
        return
    names = [name for spec in specs for name in spec.names]
    for glob, _ in boundary.rules:
        if not any(fnmatchcase(name, glob) for name in names):
            raise LayoutError(
                f"flat_param.fully_shard: boundary has a rule for {glob!r}, but no parameter of "
                "the unit matches it; names are those below the module that is sharded. There are "
                f"{', '.join(names[:5]) or 'none'}. If some units lack it, pass missing_ok=True."
            )


@dataclass(frozen=True)
class Cut:
    """How one parameter may be cut.

    Args:
        atom_numel: elements that stay together, at least 1.
        inner: sizes of the last dimensions, which stay whole; None if nothing does.
        whole: whether the parameter is never cut, and a rank has all of it or nothing.
        block_numel: elements of each row or block that the boundary keeps whole; of a row of
            tiles; 0 where there is none.
    """

    atom_numel: int
    inner: tuple[int, ...] | None
    whole: bool
    block_numel: int


def cut_of(spec: ParamSpec, boundary: Boundary) -> Cut:
    """How a parameter is cut."""
    if isinstance(boundary, BoundaryRules):
        rules, names = boundary.rules, spec.names
        matches = (each for glob, each in rules if any(fnmatchcase(name, glob) for name in names))
        own = next(matches, boundary.default)
    else:
        own = boundary
    if own == "element":
        return Cut(1, None, whole=False, block_numel=0)
    atom, inner = _atom(spec.shape, spec.stride, own)
    block = 0 if own == "tensor" else atom
    if max(1, atom) >= spec.numel:
        return Cut(max(1, spec.numel), spec.shape[1:], whole=True, block_numel=block)
    return Cut(atom, inner, whole=False, block_numel=block)


def _atom(
    shape: tuple[int, ...], stride: tuple[int, ...], boundary: Word | Blocks
) -> tuple[int, tuple[int, ...]]:
    numel = math.prod(shape)
    if boundary == "tensor" or numel == 0 or not shape:
        return numel, shape[1:]
    row_major = contiguous_stride(shape)
    if boundary == "row":
        row = numel // shape[0]
        return (row if shape[0] == 1 or stride[0] == row else numel), shape[1:]
    if any(size > 1 and a != b for size, a, b in zip(shape, stride, row_major, strict=True)):
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
