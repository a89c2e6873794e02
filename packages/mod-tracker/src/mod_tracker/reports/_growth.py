"""`assert_no_growth`: check that training steps do not leak memory."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from .._errors import check_callable, check_int
from ._allocations import Place
from ._rows import bytes_shown
from ._watch import watch_memory


def assert_no_growth(
    step: Callable[[], object], *, steps: int = 3, warmup: int = 2, slack_bytes: int = 0
) -> None:
    """Run a step several times, and fail if the memory left alive grows in each of them.

    Live bytes are compared by device, module and line after each step and a garbage collection.
    Memory leaks if a line, or all lines of a device together, have more live bytes after each of
    the steps: code paths may take turns to leak. A cache that fills once is no leak.

    Args:
        step: function to run, such as a training step.
        steps: number of steps to compare.
        warmup: number of steps before those, in which gradients and optimizer state are allocated.
        slack_bytes: growth per step, of a line or of a device, that is ignored.

    Raises:
        AssertionError: memory grows; the message has each line, with bytes per step.
        OptionError: `step` is not callable, `steps` is below 2, or another number is negative.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> model = nn.Linear(2, 2)
        >>> assert_no_growth(lambda: model(torch.ones(1, 2)).sum().backward())
    """
    check_callable("assert_no_growth", "step", step, "a function that runs one step")
    check_int("assert_no_growth", "steps", steps, 2)
    check_int("assert_no_growth", "warmup", warmup, 0)
    check_int("assert_no_growth", "slack_bytes", slack_bytes, 0)
    alive: list[Counter[Place]] = []
    with watch_memory() as watch:
        for _ in range(warmup + steps):
            step()
            gc.collect()
            alive.append(watch._mode.by_line())
    compared = alive[-steps:] if warmup == 0 else alive[-steps - 1 :]
    leaking = {place for place in compared[-1] if _grows(place, compared, slack_bytes)}
    totals = [_by_device(lines) for lines in compared]
    for device in totals[-1]:
        if _grows(device, totals, slack_bytes):
            leaking |= {place for place in compared[-1] if place[0] == device}
    grown = {
        place: (compared[-1][place] - compared[0][place]) // steps
        for place in leaking
        if compared[-1][place] > compared[0][place]
    }
    if grown:
        places = "\n".join(
            f"  {bytes_shown(size):>10} a step on {device}  {module or '(outside)'}, {line}"
            for (device, module, line), size in Counter(grown).most_common()
        )
        raise AssertionError(
            f"mod_tracker.assert_no_growth: memory grew in each of {steps} steps. Tensors made "
            f"here stay alive:\n{places}"
        )


def _grows(key: Any, compared: Sequence[Counter[Any]], slack_bytes: int) -> bool:
    """Whether the bytes of a key grow in each step."""
    return all(after[key] - before[key] > slack_bytes for before, after in pairwise(compared))


def _by_device(lines: Counter[Place]) -> Counter[str]:
    totals: Counter[str] = Counter()
    for (device, _, _), size in lines.items():
        totals[device] += size
    return totals
