"""What one training step did, as a value: what it allocated, freed, saved and read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Event = tuple[Literal["call", "free", "read", "release"], int]
"""What happened: to a call or a value by its number, to a saved tensor by its place."""


@dataclass(frozen=True, slots=True)
class StepCall:
    """One operator call of a step, in forward or backward.

    Attributes:
        made: numbers of the values that it made, in storages of their own.
        read: what it read: number of the value and how it lay in memory (`StepValue.layout`).
        most_bytes: most that was allocated while it ran, over what there was before.
    """

    made: tuple[int, ...]
    read: tuple[tuple[int, int], ...]
    most_bytes: int


@dataclass(frozen=True, slots=True)
class StepValue:
    """What a call of a step made, or wrote to a storage.

    Attributes:
        call: the number of the call.
        storage: number of the value for which its storage was made; its own, unless written.
        size_bytes: of its storage.
        layout: a number for its sizes, strides and offset; views of it have others.
    """

    call: int
    storage: int
    size_bytes: int
    layout: int


@dataclass(frozen=True)
class StepRun:
    """What happened in a step.

    Attributes:
        calls: all operator calls, in order.
        values: what they made.
        events: what happened, in order.
        saved: for each saved tensor which value it is of, -1 for what the forward was given, and
            its layout.
        dropped: for storages of forward, the number of the call before which only autograd holds
            them.
    """

    calls: tuple[StepCall, ...]
    values: tuple[StepValue, ...]
    events: tuple[Event, ...]
    saved: tuple[tuple[int, int], ...]
    dropped: Mapping[int, int]
