"""`assert_no_growth`: check that training steps do not leak memory."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from itertools import pairwise

from .._errors import check_callable, check_int
from .._numbers import bytes_shown
from ._watch import watch_memory


def assert_no_growth(
    step: Callable[[], object], *, steps: int = 3, warmup: int = 2, slack_bytes: int = 0
) -> None:
    """Run a step several times, and fail if the memory left alive grows in each of them.

    Live bytes are compared by module and line after each step and a garbage collection. A line
    leaks if it has more live bytes after each of the steps. A cache that fills once is no leak.

    Args:
        step: function to run, such as a training step.
        steps: number of steps to compare.
        warmup: number of steps before those, in which gradients and optimizer state are allocated.
        slack_bytes: growth of one line per step that is ignored.

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
    alive: list[Counter[tuple[str, str]]] = []
    with watch_memory() as watch:
        for _ in range(warmup + steps):
            step()
            gc.collect()
            alive.append(watch._mode.by_line())
    compared = alive[-steps:] if warmup == 0 else alive[-steps - 1 :]
    grown = {}
    for place in compared[-1]:
        by = [after[place] - before[place] for before, after in pairwise(compared)]
        if min(by) > slack_bytes:
            grown[place] = min(by)
    if grown:
        places = "\n".join(
            f"  {bytes_shown(size):>10} a step  {module or '(outside)'}, {line}"
            for (module, line), size in Counter(grown).most_common()
        )
        raise AssertionError(
            f"mod_tracker.assert_no_growth: memory grew in each of {steps} steps. Tensors made "
            f"here stay alive:\n{places}"
        )
