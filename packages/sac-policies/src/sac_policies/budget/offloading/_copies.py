"""What copies to host memory cost, as far as no other work hides them.

It is what a region does (`eager/_moved`), for one forward of a region that is one of several equal
ones in a row.

Rule 1. A value's copy starts when the value is made and the copies before it have ended. Work goes
        on beside it.
Rule 2. Besides the copy that is under way, others fall behind by less than the largest value that
        is offloaded: where it would be more, work waits. Where the region ends it waits for all
        that are left. (The last one runs on, here it counts.)
Rule 3. Values are asked for when backward comes to their region, or to the region after theirs if
        there is one. So the region that backward reaches first waits for all of them: what
        it repeats in between does not count as hiding them. The
        others wait for what takes longer than backward of the region after them, which takes no
        less than a forward.
Rule 4. Work is what the profiled operators took that made something. Views and writes in place take
        an accelerator next to no time, whatever a host needs to ask for them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import accumulate

from .._trace import TracedOp

SECOND = 10**9


@dataclass(frozen=True)
class Copies:
    """The copies of a region's values; all times are in nanoseconds.

    Attributes:
        sizes: bytes of what each operator made, in the order they ran.
        times: to copy that one way, rounded up.
        made: when it was made, from where the region begins (Rule 4).
        work: of one forward.
        rate: bytes per second, each way.
        regions: how many in a row.
    """

    sizes: tuple[int, ...]
    times: tuple[int, ...]
    made: tuple[int, ...]
    work: int
    rate: int
    regions: int

    @classmethod
    def of(cls, ops: Sequence[TracedOp], rate: int, regions: int) -> Copies:
        """Of what a trace in nanoseconds wrote down.

        Args:
            ops: in the order they ran.
            rate: bytes per second, each way.
            regions: at least 1.

        Example:
            >>> Copies.of([TracedOp("aten.mm.default", 0, 8, 5, (), 0)], 10**9, 1).waits([0])
            16
        """
        sizes = tuple(op.out_bytes for op in ops)
        times = tuple(-(-size * SECOND // rate) for size in sizes)
        made = tuple(accumulate(op.cost if op.out_bytes else 0 for op in ops))
        return cls(sizes, times, made, made[-1] if made else 0, rate, regions)

    def waits(self, away: Sequence[int]) -> int:
        """Return how long all regions together wait for copies.

        Args:
            away: the operators whose values are offloaded, ascending.
        """
        moved = sum(self.times[op] for op in away)
        stream = Stream(self, max((self.sizes[op] for op in away), default=0))
        for op in away:
            stream.copy(op)
        back = moved + (self.regions - 1) * max(0, moved - self.work)  # Rule 3
        return self.regions * (stream.waited + stream.left) + back

    def most_hidden(self, away: Iterable[int]) -> dict[int, int]:
        """Return the most that copies out can be hidden from where an operator is done.

        Beside each operator that is no more than what may have fallen behind by then (Rule 2).

        Args:
            away: the operators whose values may be offloaded.
        """
        ends = sorted(away)
        most = 2 * max((self.times[op] for op in ends), default=0) + len(ends)  # each rounded up
        found: dict[int, int] = {}
        hidden, after = 0, self.work
        for op in reversed(ends):
            hidden += min(most, after - self.made[op])
            found[op], after = hidden, self.made[op]
        return found


class Stream:
    """The copies out of one forward, one after another; times in nanoseconds.

    Args:
        copies: what is copied.
        most: by how many bytes they may fall behind (Rule 2).

    Attributes:
        waited: how long work has waited so far.
        left: how long the copies asked for so far go on after the region's work.
    """

    def __init__(self, copies: Copies, most: int) -> None:
        self.waited = self.left = 0
        self._copies, self._most = copies, most
        self._ends = self._behind = 0
        self._queue: deque[tuple[int, int]] = deque()  # bytes, and when they have left

    def copy(self, op: int) -> None:
        """Copy what an operator made, later than those before it."""
        copies, queue, most = self._copies, self._queue, self._most
        now = copies.made[op] + self.waited
        size, ends = copies.sizes[op], max(self._ends, now) + copies.times[op]
        behind, until = self._behind + size, now
        queue.append((size, ends))
        while behind - queue[0][0] >= most:
            first, left = queue.popleft()
            behind, until = behind - first, max(until, left)
        self.waited += until - now
        self.left = max(0, ends - copies.work - self.waited)
        self._behind, self._ends = behind, ends

    def behind(self, op: int) -> int:
        """How long the copies asked for so far still take when an operator is done."""
        return max(0, self._ends - self._copies.made[op] - self.waited)

    def fork(self) -> Stream:
        """Return another one that is where this one is."""
        other = copy(self)
        other._queue = deque(self._queue)
        return other
