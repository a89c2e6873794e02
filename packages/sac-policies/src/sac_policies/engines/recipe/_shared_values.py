"""Values that several readers share during one backward.

Rule 1. Readers are counted while the forward runs: what autograd saved, and each replay that
        reads the value besides. The value is made for the first and dropped with the last.
Rule 2. What still waits for a reader when backward ends is dropped then.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ..._torch_compat import after_backward, backward_id


class Source:
    """A kept value that replays read at an edge: a region's input, or what it keeps.

    Attributes:
        held: what is held of it.
    """

    __slots__ = ("__weakref__", "_read", "held")

    def __init__(self, held: Any, read: Callable[[Any], torch.Tensor]) -> None:
        self.held = held
        self._read = read

    def value(self) -> torch.Tensor:
        """Return it; raises where it was changed in place."""
        return self._read(self.held)


class SharedValue:
    """What all readers of one value share; it lies in the metadata of the node that made it.

    Attributes:
        key: where the metadata of nodes has the cells of the same region (`Edges`).
        leaf: copy of the leaf that a replay reads besides the node, where it is small.
        leaves: where nothing is compared, those that it reads, and how often each was written to.
        proof: what the value's bits were when a recipe was made for it.
        protected: whether `leaf` and `proof` are made.
        value: the value while more readers are expected (Rule 1).
        readers: how many there are in a backward that reads everything.
        read: how many of them have been in the running backward.
        distance: how many edges a replay follows; why there is none; None where nobody asked.
        registered: whether the readings of a replay are counted with what it reads.
        through: whether a replay reads operands at the node's edges.
        sources: kept values that a replay reads at edges, its own and those of its operands.
        held: which of the operands a replay reads from such a source, by position: how many views
            lie between, and the source; None where it reads none at edges.
        operands: what a replay reads, where a forward took it all from steps (`regions`).
        stride: how the value lay in memory, where a replay through edges may not give that; None
            where only views of it were saved.
        version: how often the value was written to when its operator returned it.
        written: its storage, where the region wrote to it uncounted after a recipe was made.
    """

    __slots__ = (
        "__weakref__",
        "distance",
        "held",
        "key",
        "leaf",
        "leaves",
        "operands",
        "proof",
        "protected",
        "read",
        "readers",
        "registered",
        "sources",
        "stride",
        "through",
        "value",
        "version",
        "written",
    )

    def __init__(self, readers: int = 0, key: str = "") -> None:
        self.key = key
        self.leaf: torch.Tensor | None = None
        self.leaves: tuple[tuple[torch.Tensor, int], ...] = ()
        self.proof: Any = None
        self.value: torch.Tensor | None = None
        self.readers = readers
        self.read = 0
        self.distance: Any = None
        self.protected = False
        self.registered = False
        self.through = False
        self.sources: tuple[weakref.ref[Source], ...] = ()
        self.held: dict[int, tuple[int, weakref.ref[Source]]] | None = None
        self.operands: tuple[Any, ...] | None = None
        self.stride: tuple[int, ...] | None = None
        self.version = 0
        self.written: torch.Tensor | None = None

    def get(self, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the value, made unless an earlier reader left it."""
        value = self.value
        if value is None:
            value = make()
        backward = backward_id()
        if backward >= 0:
            read = self.read + 1
            if read >= self.readers:
                self.value, self.read = None, 0
            else:
                self.read = read
                if self.value is None:
                    replays.hold(self, value, backward)
        return value


class Unpacked(SharedValue):
    """What hooks unpacked: a replay's reading is not the consumer's own, which is to come."""

    __slots__ = ()

    def stay(self) -> None:
        """Leave the value there after the consumer, for a replay, until the backward ends."""
        self.readers = 2

    def get(self, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the value; a replay that reads it is not counted."""
        if replays.depth == 0:
            return super().get(make)
        value = self.value
        if value is None:
            value, backward = make(), backward_id()
            if backward >= 0:
                replays.hold(self, value, backward)
        return value


class Replays(threading.local):
    """How deep this thread's replays are nested, and which cells its backward has filled."""

    depth = 0
    backward: int | None = None

    def __init__(self) -> None:
        # Weak: after a backward that failed, the graph's end is the end of its values.
        self.filled: list[weakref.ref[SharedValue]] = []

    def hold(self, cell: SharedValue, value: torch.Tensor, backward: int) -> None:
        """Leave `value` in its cell, at most until this backward ends."""
        if backward != self.backward:
            filled = self.filled
            _clear(filled)
            if not after_backward(lambda: _clear(filled)):
                return
            self.backward = backward
        self.filled.append(weakref.ref(cell))
        cell.value = value


def _clear(cells: list[weakref.ref[SharedValue]]) -> None:
    for reference in cells:
        cell = reference()
        if cell is not None:
            cell.value, cell.read = None, 0
    cells.clear()


replays = Replays()
