"""What a unit, and whoever holds one, asks of the schedule of its tree; `_schedule` answers."""

from __future__ import annotations

from typing import Protocol, TypeVar

from ..comm._comm import CommLog
from ._passes import BackwardPass, UnitBackward
from ._prefetch import PrefetchLists

U = TypeVar("U")


class UnitSchedule(Protocol[U]):
    """When the units `U` of one tree gather, free and sum; see `Schedule`.

    Attributes:
        units: in the order in which they were sharded.
        log: counts of their collectives.
        sync: whether the next backward sums gradients over ranks.
        lists: what is gathered ahead of its turn.
    """

    units: list[U]
    log: CommLog
    sync: bool
    lists: PrefetchLists[U]

    @property
    def depth(self) -> int:
        """How many units' forwards are running, one within the other."""

    @property
    def backward(self) -> BackwardPass[U] | None:
        """The backward pass that runs, or was stopped."""

    def merge(self, other: UnitSchedule[U]) -> None:
        """Take over the units of a nested tree."""

    def settle(self) -> None:
        """End a backward pass that an exception has stopped, if there is one."""

    def stop(self, depth: int) -> None:
        """An exception leaves a forward that began at `depth`."""

    def drop_accumulated(self) -> None:
        """Forget gradients that were accumulated and not summed."""

    def computes(self, unit: U) -> bool:
        """Whether the module holds the unit's leaves, as its forward or backward runs."""

    def was_freed(self, unit: U) -> None:
        """A unit is whole no more, before a backward that may come to it."""

    def enter(self, unit: U) -> None:
        """A unit's forward begins."""

    def prefetch_forward(self, unit: U) -> None:
        """Begin to gather the units that come next, while this one computes. Collective."""

    def leave(self, unit: U, *, returns: bool, keeps: bool, module: object = None) -> None:
        """The forward of a unit's module ends."""

    def standing(self, unit: U) -> UnitBackward:
        """Where a unit stands in the backward pass that runs."""

    def gather_for_backward(self, unit: U) -> None:
        """Begin to gather all units up to this one, and those after it. Collective."""

    def on_grads(self, unit: U) -> None:
        """A unit has all its gradients."""

    def release(self, unit: U) -> None:
        """Nothing of a unit's backward is left: free its whole parameters."""
