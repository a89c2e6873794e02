"""Add up mixtures of levels from recorded steps, and find the fastest that fits.

A block's contribution does not depend on the levels of others, so a mixture's peak and time are
sums over spans. Mixtures have at most two levels: between two corners of the lower convex hull of
memory and time, more levels do not help. The first blocks keep less, because their values wait
longest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ._watch import ACTIVATIONS, TAIL, ZERO, Amount, Span, added

SLICES = 16
"""Slices of logits and loss that are suggested."""


@dataclass(frozen=True)
class StepEstimate:
    """Memory and time of a mixture.

    Attributes:
        levels: names and numbers of blocks, in the order in which they run.
        peak_bytes: peak memory, with parameters and optimizer state.
        causes: bytes of gradients, of activations, and of logits and loss at the peak.
        seconds: of forward, backward and the optimizer.
    """

    levels: tuple[tuple[str, int], ...]
    peak_bytes: int
    causes: Amount
    seconds: float


@dataclass(frozen=True)
class Measured:
    """Steps on single levels, and memory besides them.

    Attributes:
        levels: by name, the spans of a step with all blocks on that level; the first is plain.
        blocks: number of blocks.
        resident_bytes: parameters, buffers, batch, optimizer state and workspaces.
        optimizer_seconds: of the optimizer's step.
    """

    levels: Mapping[str, Sequence[Span]]
    blocks: int
    resident_bytes: int
    optimizer_seconds: float

    def step(self, low: str, count: int, high: str, slices: int = 1) -> StepEstimate:
        """Return memory and time with the first `count` blocks on level `low`, the rest on `high`.

        Args:
            low: level of the first blocks.
            count: number of first blocks.
            high: level of the rest.
            slices: number of slices of logits and loss, as of `in_slices`.
        """
        seconds = self.optimizer_seconds
        for span in self._spans(low, count, high):
            seconds += span.seconds
            if slices > 1 and span.key == TAIL:
                seconds += span.seconds / 3  # each slice runs its forward again
        most = max(self._reached(low, count, high, slices), key=sum)
        levels = ((low, count), (high, self.blocks - count))
        used = tuple((name, number) for name, number in levels if number)
        return StepEstimate(used, self.resident_bytes + sum(most), most, seconds)

    def most_times(self, level: str, budget_bytes: int) -> float:
        """Return how many times the batch a step may have, with all blocks on one level.

        Activations, logits and loss grow with the batch; gradients do not.
        """
        room, found = budget_bytes - self.resident_bytes, list[float]()
        for gradients, *varying in self._reached(level, self.blocks, level, 1):
            if gradients > room:
                return 0.0
            if any(varying):
                found.append((room - gradients) / sum(varying))
        return min(found, default=0.0)

    def _reached(self, low: str, count: int, high: str, slices: int) -> Iterator[Amount]:
        """Yield the peak of each span."""
        now = ZERO
        for span in self._spans(low, count, high):
            yield added(now, _sliced(span.most, slices))
            now = added(now, _sliced(span.grown, slices))

    def _spans(self, low: str, count: int, high: str) -> Iterator[Span]:
        chosen = {low: _by_key(self.levels[low]), high: _by_key(self.levels[high])}
        for span in next(iter(self.levels.values())):
            # The last block's level decides what is freed after it; the first block's does not
            # matter.
            number = span.key[1] if isinstance(span.key, tuple) else self.blocks - 1
            yield chosen[low if number < count else high][span.key]

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


def _by_key(spans: Sequence[Span]) -> dict[object, Span]:
    return {span.key: span for span in spans}


def _sliced(amount: Amount, slices: int) -> Amount:
    gradients, activations, logits = amount
    return gradients, activations, logits // slices


def offloaded(spans: Sequence[Span], input_bytes: Sequence[int], copy_seconds: float) -> list[Span]:
    """Return the spans of blocks that run again, with offloaded inputs.

    A block's input is copied out while the next block runs, and copied back one block early. If a
    copy takes longer than the block, the step waits for the difference.

    Args:
        spans: of blocks that run again.
        input_bytes: of each block's input.
        copy_seconds: of one byte.
    """
    found = []
    for span in spans:
        if isinstance(span.key, tuple):
            direction, number = span.key
            if direction == "between":
                found.append(span)
                continue
            size = input_bytes[number]
            sign = -1 if direction == "forward" else 1
            grown = _more(span.grown, sign * size)
            # In backward, this block's input is on the device while the input of the block before
            # it arrives.
            most = _more(span.most, 0 if sign < 0 else 2 * size)
            seconds = max(span.seconds, size * copy_seconds)
            span = replace(span, grown=grown, most=most, seconds=seconds)
        found.append(span)
    return found


def _more(amount: Amount, size: int) -> Amount:
    found = list(amount)
    found[ACTIVATIONS] += size
    return found[0], found[1], found[2]
