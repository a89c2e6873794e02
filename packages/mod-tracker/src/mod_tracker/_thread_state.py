"""What one thread is doing - its running call, and the record of its calls.

Calls nest within a thread, so each thread has a state of its own. Autograd's counter is one per
thread, too, and two threads use the same numbers, so the record belongs to the thread's state.
"""

from __future__ import annotations

from collections.abc import Iterator

from ._edges import Edge
from ._record import Call, Path, Record, outside
from ._torch_compat import NO_TASK, new_carrier, next_number, number_asking

NO_INTERVAL = -1
"""A `ThreadState.number` no counter equals, so that the next transition closes the interval."""


class ThreadState:
    """The running call of a thread.

    Attributes:
        base: the call that stands for code outside every module.
        call: innermost running call; `base` when none runs.
        task: id of the backward in which that call was entered, `NO_TASK` in a plain forward.
            If another backward runs now, the thread is in backward proper.
        shown: call to report instead, while a backward hook of that call runs.
        asked: number of the node for which a module last ran again.
        number: where the open interval starts; `NO_INTERVAL` if it is not the running call's.
        owner: call that the open interval is of; None if it is the running call's.
        inner: whether the thread is one of torch's own, seen first in a backward.
        seen: counter at the last look; see `explain`.
        leaves: gradient edges of leaf inputs, by `id`, while the modules run that were given
            them: nothing else holds the node of a leaf before it is used.
        record: the closed intervals.
        paths: first path of each module, by `id`.
        carrier: brings hooks to autograd nodes; see `hook_gradient`.
    """

    __slots__ = (
        "_start",
        "asked",
        "base",
        "call",
        "carrier",
        "inner",
        "leaves",
        "number",
        "owner",
        "paths",
        "record",
        "seen",
        "shown",
        "task",
    )

    def __init__(self, *, limit: int, inner: bool = False) -> None:
        self.inner = inner
        self.record = Record(limit=limit)
        self.base = self.call = outside()
        self.task = NO_TASK
        self.asked = NO_INTERVAL
        self.shown: Call | None = None
        self.number = self._start = self.seen = next_number()
        self.owner: Call | None = None
        self.leaves: dict[int, Edge] = {}
        self.paths: dict[int, Path] = {}
        self.carrier = new_carrier()

    def push(self, path: Path, outer: Call, task: int) -> Call:
        """Enter a call of `path`; a recompute repeats the index of the call it repeats."""
        number = next_number()
        if number != self.number:
            self.flush(number, self.call)
        index = path.last[1]
        inner = (path, index + 1 if task == NO_TASK else index, outer)
        path.last = self.call = inner
        self.task = task
        return inner

    def pop(self, inner: Call, outer: Call) -> None:
        """Note that call `inner` was left, to the call that runs now; `outer` is around it."""
        number = next_number()
        if number != self.number:
            self.flush(number, inner)
        if outer is not self.call:
            self._borrow(outer, number)

    def flush(self, number: int, ran: Call) -> None:
        """Close the open interval, in which `ran` ran; the running call's begins at `number`."""
        owner = self.owner
        if owner is None:
            self.record.close(self.number, number, ran)
        else:
            self.record.close(self._start, number, owner)
            self.owner = None
        self.number = number

    def resume(self) -> None:
        """Give the nodes created from now on to the running call, after a recompute."""
        self.flush(next_number(), self.call)

    def find(self, number: int) -> Call:
        """Return the call that created node `number`."""
        owner = self.owner
        if number >= (self.number if owner is None else self._start):
            return self.call if owner is None else owner
        return self.record.find(number)

    def explain(self, call: Call) -> None:
        """Say that nodes created since the last look belong to `call`.

        Exact if said at every operation, as the reports do: it is how nodes that a backward
        creates for a second backward find their module.
        """
        if call is not (self.owner or self.call):
            since = max(self.seen, self._start if self.owner is not None else self.number)
            self.flush(since, self.call)
            if call is not self.call:
                self._borrow(call, since)
        self.seen = next_number()

    def recomputed(self) -> Call | None:
        """Return the call whose code the node that runs now has had run again; None if not known.

        Known is it once a module that this code calls has run.
        """
        return self.owner if self.owner is not None and self.asked == number_asking() else None

    def walk(self) -> Iterator[Path]:
        """Every path of this thread, the outside first."""
        return self.base[0].walk()

    def _borrow(self, owner: Call, start: int) -> None:
        self.owner, self._start, self.number = owner, start, NO_INTERVAL
