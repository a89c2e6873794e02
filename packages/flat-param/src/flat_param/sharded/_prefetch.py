"""Which units are gathered ahead of their turn, while another one computes.

In forward these are the units listed by the user, by default the unit that came next in the
previous pass. Units that have already begun in this pass are skipped. In backward, forward and the
lists determine the order of gathers when the pass begins, also on a rank without a gradient for
some unit. A list makes a gather earlier and never adds one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ._unit_params import UnitParams


class PrefetchLists:
    """The lists of the units of one tree.

    Attributes:
        forward: by unit, the units gathered when its forward begins; without an entry, the default.
        backward: the same for its backward.
    """

    def __init__(self) -> None:
        self.forward: dict[UnitParams, tuple[UnitParams, ...]] = {}
        self.backward: dict[UnitParams, tuple[UnitParams, ...]] = {}

    def merge(self, other: PrefetchLists) -> None:
        """Add the lists of a nested tree."""
        self.forward |= other.forward
        self.backward |= other.backward

    def in_forward(
        self, unit: UnitParams, *, begun: Sequence[UnitParams], last_order: Sequence[UnitParams]
    ) -> list[UnitParams]:
        """Return the units to gather while `unit` computes in forward.

        Args:
            unit: the last unit that has begun.
            begun: units in the order in which they began.
            last_order: the same order for the previous forward pass.
        """
        listed = self.forward.get(unit)
        if listed:
            return [each for each in listed if each not in begun]
        here = len(begun) - 1
        is_as_before = here + 1 < len(last_order) and last_order[here] is unit
        return [last_order[here + 1]] if is_as_before else []

    def backward_order(self, order: Iterable[UnitParams]) -> list[UnitParams]:
        """Units in the order in which they are gathered for backward.

        Args:
            order: units in the order in which backward reaches them.
        """
        found: dict[UnitParams, None] = {}
        for unit in order:
            found |= dict.fromkeys((unit, *self.backward.get(unit, ())))
        return list(found)

    def in_backward(self, unit: UnitParams, queue: Sequence[UnitParams]) -> int:
        """Return how many units of the queue to gather while `unit` computes in backward."""
        listed = self.backward.get(unit)
        if not listed:
            return 1
        return max((queue.index(each) + 1 for each in listed if each in queue), default=0)
