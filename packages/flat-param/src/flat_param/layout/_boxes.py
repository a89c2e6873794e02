"""A range of a tensor's elements as rectangles, which checkpoints can name."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Box:
    """A rectangle of a row-major tensor whose elements are consecutive.

    Args:
        offsets: first index along each dimension.
        lengths: size along each dimension.
        start: number of its first element in the tensor.
    """

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        """Elements in the box."""
        return math.prod(self.lengths)


def boxes_between(sizes: tuple[int, ...], start: int, stop: int) -> tuple[Box, ...]:
    """Cover elements `[start, stop)` of a row-major tensor with at most `2 * ndim - 1` boxes."""
    if start >= stop:
        return ()
    if not sizes:
        return (Box((), (), 0),)
    row = math.prod(sizes[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:
        return _in_row(sizes, last, start, stop)
    head = _in_row(sizes, first - 1, start, first * row)
    tail = _in_row(sizes, last, last * row, stop)
    if first == last:
        return head + tail
    zeros = (0,) * (len(sizes) - 1)
    whole = Box((first, *zeros), (last - first, *sizes[1:]), first * row)
    return (*head, whole, *tail)


def _in_row(sizes: tuple[int, ...], index: int, start: int, stop: int) -> tuple[Box, ...]:
    base = index * math.prod(sizes[1:])
    return tuple(
        replace(
            box,
            offsets=(index, *box.offsets),
            lengths=(1, *box.lengths),
            start=base + box.start,
        )
        for box in boxes_between(sizes[1:], start - base, stop - base)
    )
