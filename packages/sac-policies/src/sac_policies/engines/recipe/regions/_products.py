"""Products that the policy saves, and what is kept in their place while nobody has saved them.

Rule 1. Where a view is saved that has all of a product's storage (one of three projections), the
        product is there for replays. Products are row-major, whatever they read.
Rule 2. What is kept for want of an operand waits: where the operand is kept when the forward
        ends, one of the two would be kept for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from .._edges import fills
from .._recipes import Reconsidered
from .._replay import Node, output_facts
from .._sources import Edges, Whole

_ROW_MAJOR = frozenset(f"{name}Backward0" for name in ("Mm", "Addmm", "Bmm", "Baddbmm"))


def whole_of(
    tensor: torch.Tensor, held: Any, base: Node, output: int, read: Callable[[Any], torch.Tensor]
) -> Whole | None:
    """What is held of a product by a view of it; None where the view has not all (Rule 1).

    Args:
        tensor: the view.
        held: what is held of that.
        base: the node that made the product.
        output: which of that one's outputs it is.
        read: reads what is held.
    """
    if type(base).__name__ not in _ROW_MAJOR:
        return None
    facts = output_facts(base, output)
    if facts is None or not fills(facts.shape, tensor):
        return None
    return Whole(held, read, facts.shape)


class Products:
    """Of one forward of one region."""

    def __init__(self, edges: Edges, read: Callable[[Any], torch.Tensor]) -> None:
        self._edges, self._read = edges, read
        self._waiting: list[tuple[torch.Tensor, Reconsidered]] = []
        self._kept: list[tuple[torch.Tensor, int]] = []

    def keep(self, tensor: torch.Tensor, held: Any, base: Node, output: int) -> None:
        """Note that a tensor is kept because the policy saves what it is a view of (Rule 1).

        Args:
            tensor: what a node saves.
            held: what is held of it.
            base: the node that made it, past its views.
            output: which of that one's outputs it is.
        """
        self._kept.append((tensor, tensor._version))
        whole = None if base is tensor.grad_fn else whole_of(tensor, held, base, output, self._read)
        if whole is not None:
            self._edges.keep_whole((base, output), whole)

    def wait(self, tensor: torch.Tensor, held: Any, number: int, is_result: bool) -> Reconsidered:
        """Keep a tensor until it is known whether it has to be (Rule 2).

        Args:
            tensor: what a node saves.
            held: what is held of it.
            number: that after the node.
            is_result: whether the node made it.
        """
        kept = Reconsidered(held, number, is_result, tensor._version, self._read)
        self._waiting.append((tensor, kept))
        return kept

    def resume(self, tensor: torch.Tensor, kept: Reconsidered) -> None:
        """Have a tensor wait that another has kept so far."""
        self._waiting.append((tensor, kept))

    @property
    def count(self) -> int:
        """How many are kept."""
        return len(self._kept)

    @property
    def are_kept(self) -> bool:
        """Whether there are any, and nobody wrote to one: it could not be read any more."""
        for each, version in self._kept:
            if each._version != version:
                return False
        return bool(self._kept)

    def waiting(self) -> Iterator[tuple[torch.Tensor, Reconsidered]]:
        """Give what waits and nobody wrote to, once."""
        waiting, self._waiting = self._waiting, []
        return (each for each in waiting if each[0]._version == each[1].version)

    def forget(self) -> None:
        """Have nothing wait: what is kept stays."""
        self._waiting.clear()
        self._kept.clear()
