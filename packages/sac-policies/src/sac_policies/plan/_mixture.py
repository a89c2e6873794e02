"""Predict mixtures of levels from recorded steps, and find the fastest that fits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
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
        return self._estimate(self._all_on(level))

    def most_times(self, level: str, budget_bytes: int) -> float:
        """Return how many times the batch a step may have, with all blocks on one level.

        Activations, logits and loss grow with the batch; gradients do not.
        """
        room, found = budget_bytes - self._resident_bytes, list[float]()
        for gradients, *varying in _reached(self._steps.mixture(self._all_on(level))):
            if gradients > room:
                return 0.0
            if any(varying):
                found.append((room - gradients) / sum(varying))
        return min(found, default=0.0)

    def fastest(self, budget_bytes: int) -> StepEstimate | None:
        """Return the fastest mixture that fits."""
        choice = self._steps.choose(budget_bytes - self._resident_bytes)
        return None if choice is None else self._estimate(choice)

    def smallest(self) -> StepEstimate:
        """Return the mixture with the lowest peak."""
        return self._estimate(self._steps.least())

    def _estimate(self, choice: Sequence[int]) -> StepEstimate:
        """Return memory and time of a mixture, given by the level of each block."""
        intervals = list(self._steps.mixture(choice))
        seconds = self._optimizer_seconds + sum(each.ns for each in intervals) / SECOND
        most = max(_reached(intervals), key=sum)
        runs = tuple((self._names[level], len(list(same))) for level, same in groupby(choice))
        return StepEstimate(runs, self._resident_bytes + sum(most), most, seconds)

    def _all_on(self, level: str) -> list[int]:
        return [self._names.index(level)] * self._blocks


def _reached(intervals: Iterable[Interval]) -> Iterator[Causes]:
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
