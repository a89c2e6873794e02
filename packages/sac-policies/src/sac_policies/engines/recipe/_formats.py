"""How a value lies in memory, as far as views of it tell."""

from __future__ import annotations

import torch

from ._replay import Node, output_facts
from ._views import ROW_MAJOR, TAKES

CLONE, TO_COPY = "CloneBackward0", "ToCopyBackward0"
"""Copies: a call may ask for a format that their nodes do not tell."""


def may_lie_otherwise(rule: str, tensor: torch.Tensor, base: Node, compares: bool) -> bool:
    """Whether a replay of a copy may lie in another way than what was saved of it.

    A cast's replay lies as its operand does, and is laid as the cast did where all of that was
    saved; of views row-major ones are known. Where all is compared, that tells of the others.
    """
    if rule == TO_COPY:
        is_view = tensor.grad_fn is not base
        return is_view and not compares and not is_row_major(tensor, base)
    return rule == CLONE and not is_row_major(tensor, base)


def is_row_major(tensor: torch.Tensor, base: Node) -> bool:
    """Whether a saved view lies as it does over a row-major output of `base` (Rule 3)."""
    views: list[Node] = []
    node: Node = tensor.grad_fn
    while node is not base:
        views.append(node)
        node = node.next_functions[0][0]
    facts = output_facts(base)
    if facts is None:
        return False
    shape = tuple(facts.shape)
    strides = row_major_strides(shape)
    for view in reversed(views):
        name, after = type(view).__name__, output_facts(view)
        if after is None:
            return False
        if name == "ExpandBackward0" and tuple(after.shape) == shape:
            continue
        if name in ROW_MAJOR and strides == row_major_strides(shape):
            shape = tuple(after.shape)
            strides = row_major_strides(shape)
        elif name in ("TBackward0", "TransposeBackward0", "PermuteBackward0"):
            order = TAKES[name](view, _Order(range(len(shape))), 0)
            shape, strides = (tuple(each[at] for at in order) for each in (shape, strides))
        else:
            return False
    return all(
        size == 1 or one == other
        for size, one, other in zip(shape, strides, tensor.stride(), strict=True)
    )


def row_major_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor of this shape."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


class _Order(list[int]):
    """Dimensions in an order; takes the views that only change it, as a tensor does."""

    def t(self) -> _Order:
        """Swap two dimensions, where there are two."""
        return _Order(reversed(self))

    def transpose(self, one: int, other: int) -> _Order:
        """Swap these two."""
        swapped = _Order(self)
        swapped[one], swapped[other] = self[other], self[one]
        return swapped

    def permute(self, dims: list[int]) -> _Order:
        """Put them in this order."""
        return _Order(self[dim] for dim in dims)
