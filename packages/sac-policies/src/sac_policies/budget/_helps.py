"""Suggest remedies, with bytes, if no choice of levels fits the budget."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ._measure import Interval, bytes_of, highest
from ._sizes import format_size
from ._step import BACKWARD, Step

SLICES = 16
"""Slices of logits and loss that are suggested."""
_WORTH = 0.01
"""Smallest saving that is worth a line, as a share of the smallest peak."""


def what_helps(step: Step, plain: Sequence[Interval], smallest: int, allowed: int) -> str:
    """List ways to save the lacking bytes.

    Args:
        step: the step that does not fit.
        plain: its intervals without checkpointing.
        smallest: the lowest peak that was measured.
        allowed: the budget.
    """
    return "; ".join(_ways(step, plain, smallest, smallest - allowed))


def _ways(step: Step, plain: Sequence[Interval], smallest: int, lacking: int) -> Iterator[str]:
    device = step.device
    params = list(step.model.parameters())
    weights = bytes_of(params, device=device)
    gradients = bytes_of([p for p in params if p.requires_grad], device=device)
    state = step.optimizer_bytes()
    logits = tail_bytes(plain)
    saved = logits - logits // SLICES
    if saved > _WORTH * smallest:
        yield f"in_slices(function, {SLICES}) over logits and loss saves up to {format_size(saved)}"
    varying = smallest - weights - gradients - state
    share = 1 - lacking / varying if varying > 0 else 0.0
    if share > 0:
        yield f"with {100 * share:.0f} % of the tokens it would fit ({format_size(varying)} vary)"
    if state > _WORTH * smallest:
        yield f"optimizer state in host memory saves {format_size(state)}"
    half = (weights + gradients + state) // 2
    if half > _WORTH * smallest:
        yield f"sharding over 2 ranks saves {format_size(half)} on each"


def tail_bytes(intervals: Sequence[Interval]) -> int:
    """Return the peak of the code after the last block, until backward reaches that block.

    Example:
        >>> head = Interval((1, 0, None), 8, 8)
        >>> tail_bytes([Interval((1, 0, False), 64, 64), head, Interval(BACKWARD, 4, 16)])
        24
    """
    keys = [each.key for each in intervals]
    if BACKWARD not in keys:
        return 0
    at = keys.index(BACKWARD)
    before = keys[at - 1] if at else None
    ends_a_block = isinstance(before, tuple) and before[-1] is None
    return highest(intervals[at - 1 if ends_a_block else at : at + 1])
