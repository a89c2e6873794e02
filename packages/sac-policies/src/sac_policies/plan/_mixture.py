"""Predict mixtures of levels from recorded steps, and find the fastest that fits.

Mixtures have at most two levels: between two corners of the lower convex hull of
memory and time, more levels do not help. The first blocks keep less, because their values wait
longest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..budget._intervals import Steps
from ._watch import SECOND, ZERO, Amount, Span, added, tail_of

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
    _by_slices: dict[int, Steps[Span]] = field(default_factory=dict)

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

    def _spans(self, low: str, count: int, high: str, slices: int) -> list[Span]:
        if slices not in self._by_slices:
            tail = tail_of(self.blocks)
            steps = [
                [_sliced(span, slices, is_tail=span.key == tail) for span in spans]
                for spans in self.levels.values()
            ]
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


def _reached(spans: Sequence[Span]) -> Iterator[Amount]:
    """Yield the peak of each span."""
    now = ZERO
    for span in spans:
        yield added(now, span.most_by)
        now = added(now, span.grown_by)
        now = _more(now, span.grown - sum(span.grown_by))  # held longer in a mixture


def _sliced(span: Span, slices: int, *, is_tail: bool) -> Span:
    """Return an interval if logits and loss are in slices, each of which runs its forward again."""
    if slices == 1:
        return span
    grown, most = ((*each[:2], each[2] // slices) for each in (span.grown_by, span.most_by))
    ns = span.ns + (span.ns // 3 if is_tail else 0)
    return replace(span, grown=sum(grown), most=sum(most), ns=ns, grown_by=grown, most_by=most)


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
        if span.key is not None and span.key[2] is not None:
            number, _, is_backward = span.key
            size = input_bytes[number] if is_backward else -input_bytes[number]
            # In backward, this block's input is on the device while the input of the block before
            # it arrives.
            most = 2 * size if is_backward else 0
            span = replace(
                span,
                grown=span.grown + size,
                most=span.most + most,
                ns=max(span.ns, round(abs(size) * copy_seconds * SECOND)),
                grown_by=_more(span.grown_by, size),
                most_by=_more(span.most_by, most),
            )
        found.append(span)
    return found


def _more(amount: Amount, size: int) -> Amount:
    gradients, activations, logits = amount
    return gradients, activations + size, logits
