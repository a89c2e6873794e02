"""Predict mixtures of levels from recorded steps, and find the fastest that fits.

Mixtures have at most two levels: between two corners of the lower convex hull of
memory and time, more levels do not help. The first blocks keep less, because their values wait
longest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..budget._intervals import Steps
from ..budget._link import SECOND
from ..budget._measure import Interval, tail_of


class Causes(NamedTuple):
    """Bytes of gradients, of activations, and of logits and loss."""

    gradients: int
    activations: int
    logits: int


@dataclass(frozen=True)
class StepEstimate:
    """Memory and time of a mixture.

    Attributes:
        levels: names and numbers of blocks, in the order in which they run.
        peak_bytes: peak memory, with parameters and optimizer state.
        causes: of the bytes at the peak.
        seconds: of forward, backward and the optimizer.
    """

    levels: tuple[tuple[str, int], ...]
    peak_bytes: int
    causes: Causes
    seconds: float


class Measured:
    """Steps on single levels, and memory besides them.

    Args:
        levels: by name, the intervals of a step with all blocks on that level; the first is plain.
        blocks: number of blocks.
        resident_bytes: parameters, buffers, batch, optimizer state and workspaces.
        optimizer_seconds: of the optimizer's step.
        slices: number of slices of logits and loss, as of `in_slices`.
    """

    def __init__(
        self,
        levels: Mapping[str, Sequence[Interval]],
        blocks: int,
        resident_bytes: int,
        optimizer_seconds: float,
        slices: int = 1,
    ) -> None:
        self._names, self._blocks = list(levels), blocks
        self._resident_bytes, self._optimizer_seconds = resident_bytes, optimizer_seconds
        self._steps = Steps(range(blocks), [_sliced(each, slices) for each in levels.values()])

    def uniform(self, level: str) -> StepEstimate:
        """Return memory and time with all blocks on one level."""
        return self._step(level, self._blocks, level)

    def most_times(self, level: str, budget_bytes: int) -> float:
        """Return how many times the batch a step may have, with all blocks on one level.

        Activations, logits and loss grow with the batch; gradients do not.
        """
        room, found = budget_bytes - self._resident_bytes, list[float]()
        for gradients, *varying in _reached(self._mixture(level, self._blocks, level)):
            if gradients > room:
                return 0.0
            if any(varying):
                found.append((room - gradients) / sum(varying))
        return min(found, default=0.0)

    def fastest(self, budget_bytes: int) -> StepEstimate | None:
        """Return the fastest mixture that fits; of equally fast ones, the smallest."""
        fitting = [one for one in self._steps_of_two() if one.peak_bytes <= budget_bytes]
        return min(fitting, key=lambda one: (one.seconds, one.peak_bytes), default=None)

    def smallest(self) -> StepEstimate:
        """Return the mixture with the lowest peak; of equal peaks, the fastest."""
        return min(self._steps_of_two(), key=lambda one: (one.peak_bytes, one.seconds))

    def _steps_of_two(self) -> Iterator[StepEstimate]:
        """Yield all mixtures of at most two levels."""
        for at, high in enumerate(self._names):
            yield self.uniform(high)
            for low in self._names[at + 1 :]:
                for count in range(1, self._blocks):
                    yield self._step(low, count, high)

    def _step(self, low: str, count: int, high: str) -> StepEstimate:
        """Return memory and time with the first `count` blocks on level `low`, the rest `high`."""
        intervals = self._mixture(low, count, high)
        seconds = self._optimizer_seconds + sum(each.ns for each in intervals) / SECOND
        most = max(_reached(intervals), key=sum)
        levels = ((low, count), (high, self._blocks - count))
        used = tuple((name, number) for name, number in levels if number)
        return StepEstimate(used, self._resident_bytes + sum(most), most, seconds)

    def _mixture(self, low: str, count: int, high: str) -> list[Interval]:
        first, rest = map(self._names.index, (low, high))
        return list(self._steps.mixture([first] * count + [rest] * (self._blocks - count)))


def _reached(intervals: Sequence[Interval]) -> Iterator[Causes]:
    """Yield the peak of each interval."""
    now = gradients = logits = 0
    for each in intervals:
        own = gradients + each.gradients[1], logits + each.logits[1]
        yield Causes(own[0], now + each.most - sum(own), own[1])
        now += each.grown
        gradients += each.gradients[0]
        logits += each.logits[0]


def _sliced(intervals: Sequence[Interval], slices: int) -> Sequence[Interval]:
    """Return a step whose logits and loss are in slices, each of which runs its forward again."""
    if slices == 1:
        return intervals
    tail, found = tail_of(each.key for each in intervals), []
    for each in intervals:
        kept = each.logits[0] // slices, each.logits[1] // slices
        grown, most = each.grown - each.logits[0] + kept[0], each.most - each.logits[1] + kept[1]
        ns = each.ns + (each.ns // 3 if each.key == tail else 0)
        found.append(replace(each, grown=grown, most=most, ns=ns, logits=kept))
    return found


def offloaded(
    intervals: Sequence[Interval], input_bytes: Sequence[int], copy_seconds: float
) -> list[Interval]:
    """Return the intervals of blocks that run again, with offloaded inputs.

    A block's input is copied out while the next block runs, and copied back one block early. If a
    copy takes longer than the block, the step waits for the difference.

    Args:
        intervals: of blocks that run again.
        input_bytes: of each block's input.
        copy_seconds: of one byte.
    """
    found = []
    for each in intervals:
        if each.key is not None and each.key[2] is not None:
            number, _, is_backward = each.key
            size = input_bytes[number] if is_backward else -input_bytes[number]
            # In backward, this block's input is on the device while the input of the block before
            # it arrives.
            most = each.most + (2 * size if is_backward else 0)
            ns = max(each.ns, round(abs(size) * copy_seconds * SECOND))
            each = replace(each, grown=each.grown + size, most=most, ns=ns)
        found.append(each)
    return found
