"""The 0/1 knapsack in exact integers, with a bound on the distance from the optimum.

Items are sorted by value per weight and taken until one does not fit (the *break* item). An
optimal set differs from that *break set* in few items close to the break, the *core*. States
(weight, value, flipped core items) grow by one core item at a time, alternately one
to the right (added) and one to the left (removed). A state is dropped if another weighs
no more and is worth no less, or if its Dantzig bound does not exceed the best known set. The
search ends when no state is left; the best set is then optimal.

The method follows Pisinger 1997, "A minimal algorithm for the 0-1 knapsack problem". At most
`limit` states are kept at a time, and `effort` states are examined in all. If states had to be
dropped, `bound` is the best value that they could have reached.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

State = tuple[int, int, int]
"""Weight, minus the value, bits of the core items that were flipped."""


@dataclass(frozen=True, slots=True)
class Packing:
    """A set of items that fits.

    Attributes:
        taken: indices, ascending.
        weight: of the set; at most the capacity.
        value: of the set.
        bound: upper bound of the optimum; equal to `value` if the set is optimal.
    """

    taken: tuple[int, ...]
    weight: int
    value: int
    bound: int


def pack(
    weights: Sequence[int],
    values: Sequence[int],
    *,
    capacity: int,
    limit: int = 400,
    effort: int = 25_000,
) -> Packing:
    """Choose the most valuable items whose weights fit in `capacity`.

    Args:
        weights: one int >= 0 per item.
        values: one int >= 0 per item; items of value 0 are not taken.
        capacity: int >= 0.
        limit: states kept at a time; the result is optimal unless more were needed.
        effort: states examined in all; limits the time without using a clock.

    Example:
        >>> pack([6, 5, 5], [7, 5, 5], capacity=10)
        Packing(taken=(1, 2), weight=10, value=10, bound=10)
    """
    free = [i for i, w in enumerate(weights) if w == 0 and values[i] > 0]
    rest = [i for i, w in enumerate(weights) if 0 < w <= capacity and values[i] > 0]
    # Of equal items the light ones last: they fill the rest.
    rest.sort(key=lambda i: (-((values[i] << 64) // weights[i]), -weights[i]))
    search = _Search([weights[i] for i in rest], [values[i] for i in rest], capacity, limit)
    chosen = search.run(effort)
    free_value = sum(values[i] for i in free)
    taken = sorted(free + [rest[k] for k in chosen])
    return Packing(
        taken=tuple(taken),
        weight=sum(weights[i] for i in taken),
        value=sum(values[i] for i in taken),
        bound=search.bound + free_value,
    )


class _Search:
    """One run over items that are sorted by value per weight, best first."""

    def __init__(self, weights: list[int], values: list[int], capacity: int, limit: int) -> None:
        self.weights, self.values, self.capacity, self.limit = weights, values, capacity, limit
        self.core: list[int] = []
        self.lost = 0
        self.break_at, self.break_weight, self.break_value = self._break()

    @property
    def bound(self) -> int:
        return max(self.best, self.lost)

    def run(self, effort: int) -> list[int]:
        """Search and return the positions of the best set."""
        fill = self._greedy()
        self.best, self.best_bits = sum(self.values[k] for k in fill), -1
        states: list[State] = [(self.break_weight, -self.break_value, 0)]
        left, right = self.break_at - 1, self.break_at
        while states and (left >= 0 or right < len(self.weights)):
            effort -= len(states)
            if effort < 0:
                self._let_go(states, self._bounds(states, left, right), keep=0)
                break
            if right < len(self.weights):
                states = self._flip(states, right, sign=1, left=left, right=right + 1)
                right += 1
            if left >= 0:
                states = self._flip(states, left, sign=-1, left=left - 1, right=right)
                left -= 1
        return fill if self.best_bits < 0 else self._flipped()

    def _break(self) -> tuple[int, int, int]:
        at = bisect_right(list(accumulate(self.weights)), self.capacity)
        return at, sum(self.weights[:at]), sum(self.values[:at])

    def _greedy(self) -> list[int]:
        taken, room = list(range(self.break_at)), self.capacity - self.break_weight
        for k in range(self.break_at, len(self.weights)):
            if self.weights[k] <= room:
                taken.append(k)
                room -= self.weights[k]
        return taken

    def _flip(
        self, states: list[State], item: int, *, sign: int, left: int, right: int
    ) -> list[State]:
        """Let each state also flip `item`; `left` and `right` are the next two of the core."""
        weight, value = sign * self.weights[item], sign * self.values[item]
        if self._dantzig(self.break_weight + weight, self.break_value + value) > self.best:
            bit = 1 << len(self.core)
            self.core.append(item)
            states = states + [(w + weight, p - value, bits | bit) for w, p, bits in states]
            states.sort()
        return self._prune(states, left, right)

    def _dantzig(self, weight: int, value: int) -> int:
        """Return an upper bound for sets that extend the break set with one flip of this size."""
        k = min(self.break_at, len(self.weights) - 1)
        return value + (self.capacity - weight) * self.values[k] // self.weights[k]

    def _prune(self, states: list[State], left: int, right: int) -> list[State]:
        """Drop dominated and hopeless states; record the best set that fits."""
        front, top = [], -1
        for state in states:
            weight, value = state[0], -state[1]
            if value <= top:
                continue
            top = value
            front.append(state)
            if weight <= self.capacity and value > self.best:
                self.best, self.best_bits = value, state[2]
        bounds = self._bounds(front, left, right)
        hopeful = [n for n, bound in enumerate(bounds) if bound > self.best]
        front, bounds = [front[n] for n in hopeful], [bounds[n] for n in hopeful]
        return front if len(front) <= self.limit else self._let_go(front, bounds, keep=self.limit)

    def _bounds(self, states: list[State], left: int, right: int) -> list[int]:
        """Bound the value of each state: fill room, or empty excess, at the best density."""
        capacity = self.capacity
        gain, gain_weight = self._density(right)
        loss, loss_weight = self._density(left)
        return [
            -p + (capacity - w) * gain // gain_weight
            if w <= capacity
            else (-p + (capacity - w) * loss // loss_weight if left >= 0 else -1)
            for w, p, _ in states
        ]

    def _density(self, item: int) -> tuple[int, int]:
        inside = 0 <= item < len(self.weights)
        return (self.values[item], self.weights[item]) if inside else (0, 1)

    def _let_go(self, states: list[State], bounds: list[int], *, keep: int) -> list[State]:
        """Keep only the `keep` most promising states, and record the best bound of the others.

        Among equal bounds, keep the states closest to the capacity: if all items have equal
        density, all bounds are equal.
        """
        spare = [abs(self.capacity - state[0]) for state in states]
        order = sorted(range(len(states)), key=lambda n: (-bounds[n], spare[n]))
        self.lost = max(self.lost, *(bounds[n] for n in order[keep : keep + 1]), 0)
        return [states[n] for n in sorted(order[:keep])]

    def _flipped(self) -> list[int]:
        flips = {item for n, item in enumerate(self.core) if self.best_bits >> n & 1}
        return sorted(flips ^ set(range(self.break_at)))
