"""One pass over a forward: what to offload at a price of a byte kept.

States go along the forward, and at each value some go on as two: one offloads it, one does not. The
clock is that of the work: it stands still while work waits.

Rule 1. Of two states the one whose copies leave later is dropped unless it costs less, and the
        other one unless waiting until its copies had left, too, would make the later one cost as
        much. Nothing is lost: what a state still has to pay does not fall with the time at which
        its copies leave, and rises by no more than waiting for it costs.
Rule 2. `loosely`, all that is known of copies is when the last one leaves. What has fallen behind
        by then, after waiting, is the copy under way and others that are together smaller than
        the largest value (`_copies`, Rule 2), which is a bound on time. Take a plan, and let a
        state offload the first call of each of its items, waiting only where that bound asks for
        it. By induction over the forward it has waited no longer than the plan, and its copies
        leave no later. So the least that a state pays is below what any plan pays.
Rule 3. Where there are too many states, loosely, neighbours that differ the least become one that
        is as cheap as the last and as early as the first, which keeps Rule 2.
Rule 4. `exactly`, a state has the queue of its copies, and finds plans. It is told which is the
        largest value that is offloaded, and offloads that one. Of too many states half go on for
        what they pay in all, with what is still to pay if copies are a flow (`_flow`), and half for
        differing the most from their neighbours, as a flow does not know when copies fit.

Where all values are of one size, what both say of copies is the same: one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

from ._bounds import ONE, Values
from ._copies import SECOND
from ._flow import PART, Rest, flow, usual_limits

_WIDTH = 8
"""States that go on in loose passes."""
_NARROW = 4
"""In exact ones."""

Queue = tuple[int, int, tuple[tuple[int, int], ...]]
"""How long work has waited, bytes that have not left, and copies of those: bytes, and when, with
waits, they leave."""
Chain = tuple[int, "Chain"] | None
"""What is offloaded, last first."""
State = tuple[int, int, int, Chain, Queue]
"""When its copies have left, what it costs beside others, and a number that no other has."""
Push = Callable[[int, Queue, int, int, int], tuple[int, int, Queue]]
"""Copy bytes that are made now, for a time: when copies have left, how long work waits, queue."""


class Sweep(NamedTuple):
    """What a pass found.

    Attributes:
        away: items to offload, ascending.
        kept_bytes: of what is then cheaper to keep than to repeat.
        bound: where it was loose, no plan costs less.
    """

    away: list[int]
    kept_bytes: int
    bound: int


def sweep(
    values: Values, price: int, largest: int | None = None, *, width: int | None = None
) -> Sweep:
    """Pass over the forward.

    Args:
        values: what is decided about.
        price: of a byte kept, in 1/ONE.
        largest: of the items that are offloaded, for an exact pass; else it is loose. Of one call.
        width: how many states go on.
    """
    copies, items, regions = values.copies, values.items, values.copies.regions
    most = None if largest is None else values.largest[largest]
    push = _loosely(values) if most is None else _exactly(most)
    front: list[State] = [(0, 0, 0, None, (0, 0, ()))]
    stay, width = values.stay(price), width or (_WIDTH if most is None else _NARROW)
    rest = {} if largest is None else _guide(values, stay, largest)
    number = 0
    for n, cost in enumerate(stay):
        op, gain = items[n].ops[0], cost - values.copy[n]
        size, now, time = copies.sizes[op], copies.made[op], copies.times[op]
        small = most is None or (size <= most and len(items[n].ops) == 1)
        if n != largest and (gain <= 0 or not small):
            continue
        while len(front) > 1 and front[1][0] <= now:
            del front[0]
        before = len(front)
        for ends, spent, _, away, queue in front[:]:
            ends, waits, queue = push(ends, queue, now, size, time)
            number += 1
            front.append((ends, spent - gain + regions * waits, number, (n, away), queue))
        if n == largest:  # it is offloaded, as `push` takes it to be
            del front[:-before]
        front = _undominated(front, regions)
        if len(front) > width:
            front = _likeliest(front, width, rest[n], now) if rest else _thinned(front, width)
    whole = (
        (spent + regions * max(0, ends - copies.work), number, away)
        for ends, spent, number, away, _ in front
    )
    least, _, chain = min(whole)
    found = _unrolled(chain)
    gone = set(found)
    kept = sum(
        size for n, size in enumerate(values.sizes) if n not in gone and stay[n] < values.repeat[n]
    )
    bound = sum(stay) + least - -(-price * values.capacity // ONE)
    return Sweep(found, kept, bound)


def _loosely(values: Values) -> Push:
    """As Rule 2 says; a value may be offloaded only so that others may fall behind by as much."""
    copies = values.copies
    most = max(values.largest)
    behind = values.behind(most) - (-most * SECOND // copies.rate)

    def push(ends: int, queue: Queue, now: int, size: int, time: int) -> tuple[int, int, Queue]:
        ends = (ends if ends > now else now) + time
        waits = ends - now - behind
        return (ends - waits, waits, queue) if waits > 0 else (ends, 0, queue)

    return push


def _exactly(most: int) -> Push:
    """As `Stream` does."""

    def push(ends: int, queue: Queue, now: int, size: int, time: int) -> tuple[int, int, Queue]:
        waited, behind, copies = queue
        ends = (ends if ends > now else now) + time
        now = until = now + waited
        behind, out = behind + size, 0
        copies = (*copies, (size, ends + waited))
        for first, left in copies:
            if left > now and behind - first < most:
                break
            behind, out = behind - first, out + 1
            if left > until:
                until = left
        waits = until - now
        return ends - waits, waits, (waited + waits, behind, copies[out:])

    return push


def _undominated(states: list[State], regions: int) -> list[State]:
    """Those that Rule 1 leaves, the earliest first."""
    front: list[State] = []
    for state in sorted(states):
        ends, spent = state[:2]
        if front and spent >= front[-1][1]:
            continue
        while front and front[-1][1] >= spent + regions * (ends - front[-1][0]):
            front.pop()
        front.append(state)
    return front


def _thinned(front: list[State], width: int) -> list[State]:
    """So many as may go on: neighbours that differ the least go together (Rule 3)."""
    differ = _differ(front)
    order = sorted(range(len(differ)), key=differ.__getitem__)
    together = set(order[: len(front) - width])
    thinned: list[State] = []
    for n, state in enumerate(front):
        if n - 1 in together:
            thinned[-1] = (thinned[-1][0], *state[1:])
        else:
            thinned.append(state)
    return thinned


def _guide(values: Values, stay: Sequence[int], largest: int) -> dict[int, Rest]:
    """What is still to pay after each item, if copies were a flow."""
    trail: dict[int, Rest] = {}
    flow(values, stay, usual_limits(values, largest), largest, trail)
    return trail


def _likeliest(front: list[State], width: int, rest: Rest, now: int) -> list[State]:
    """So many as may go on (Rule 4)."""
    still = rest.at(state[0] - now for state in front)
    pays = [PART * state[1] + more for state, more in zip(front, still, strict=True)]
    likely = sorted(range(len(front)), key=pays.__getitem__)[: width // 2]
    differ = _differ(front)
    other = sorted(range(1, len(front)), key=lambda n: -differ[n - 1])
    go_on = set(likely)
    for n in other:
        if len(go_on) == width:
            break
        go_on.add(n)
    return [front[n] for n in sorted(go_on)]


def _differ(front: list[State]) -> list[int]:
    """By how much each differs from the one before it, but for the first."""
    return [(later[0] - first[0]) * (first[1] - later[1]) for first, later in pairwise(front)]


def _unrolled(chain: Chain) -> list[int]:
    found = []
    while chain is not None:
        n, chain = chain
        found.append(n)
    return found[::-1]
