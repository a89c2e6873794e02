"""Predict mixtures of levels from recorded steps, and find the fastest that fits.

Mixtures have at most two levels: between two corners of the lower convex hull of
memory and time, more levels do not help. The first blocks keep less, because their values wait
longest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ..budget._intervals import Steps
from ..budget._measure import Interval, tail_of
from ._watch import SECOND

SLICES = 16
"""Slices of logits and loss that are suggested."""


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


@dataclass(frozen=True)
class Measured:
    """Steps on single levels, and memory besides them.

    Attributes:
        levels: by name, the intervals of a step with all blocks on that level; the first is plain.
        blocks: number of blocks.
        resident_bytes: parameters, buffers, batch, optimizer state and workspaces.
        optimizer_seconds: of the optimizer's step.
    """

    levels: Mapping[str, Sequence[Interval]]
    blocks: int
    resident_bytes: int
    optimizer_seconds: float
    _by_slices: dict[int, Steps] = field(default_factory=dict)

    def step(self, low: str, count: int, high: str, slices: int = 1) -> StepEstimate:
        """Return memory and time with the first `count` blocks on level `low`, the rest on `high`.

        Args:
            low: level of the first blocks.
            count: number of first blocks.
            high: level of the rest.
            slices: number of slices of logits and loss, as of `in_slices`.
        """
        spans = self._spans(low, count, high, slices)
        seconds = self.optimizer_seconds + sum(span.ns for span in spans) / SECOND
        most = max(_reached(spans), key=sum)
        levels = ((low, count), (high, self.blocks - count))
        used = tuple((name, number) for name, number in levels if number)
        return StepEstimate(used, self.resident_bytes + sum(most), most, seconds)

    def most_times(self, level: str, budget_bytes: int) -> float:
        """Return how many times the batch a step may have, with all blocks on one level.

        Activations, logits and loss grow with the batch; gradients do not.
        """
        room, found = budget_bytes - self.resident_bytes, list[float]()
        for gradients, *varying in _reached(self._spans(level, self.blocks, level, 1)):
            if gradients > room:
                return 0.0
            if any(varying):
                found.append((room - gradients) / sum(varying))
        return min(found, default=0.0)

    def _spans(self, low: str, count: int, high: str, slices: int) -> list[Interval]:
        if slices not in self._by_slices:
            steps = [_sliced(spans, slices) for spans in self.levels.values()]
            self._by_slices[slices] = Steps(range(self.blocks), steps)
        first, rest = map(list(self.levels).index, (low, high))
        choice = [first] * count + [rest] * (self.blocks - count)
        return list(self._by_slices[slices].mixture(choice))

    def mixtures(self, slices: int = 1) -> Iterator[StepEstimate]:
        """Yield all mixtures of at most two levels."""
        names = list(self.levels)
        for at, high in enumerate(names):
            yield self.step(high, self.blocks, high, slices)
            for low in names[at + 1 :]:
                for count in range(1, self.blocks):
                    yield self.step(low, count, high, slices)

    def fastest(self, budget_bytes: int, slices: int = 1) -> StepEstimate | None:
        """Return the fastest mixture that fits; of equally fast ones, the smallest."""
        fitting = [one for one in self.mixtures(slices) if one.peak_bytes <= budget_bytes]
        return min(fitting, key=lambda one: (one.seconds, one.peak_bytes), default=None)

    def smallest(self, slices: int = 1) -> StepEstimate:
        """Return the mixture with the lowest peak; of equal peaks, the fastest."""
        return min(self.mixtures(slices), key=lambda one: (one.peak_bytes, one.seconds))


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
