"""Side-by-side timing: all candidates in turn within each round, in thread CPU time.

A turn is several runs, as in a training loop that repeats: the first finds the memory of another
candidate in the caches, the others their own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

Step = Callable[[], object]

_RUNS_A_TURN = 3


def side_by_side(steps: Mapping[str, Step], *, rounds: int = 30, warm: int = 4) -> dict[str, float]:
    """The least time of each candidate over rounds that take turns, microseconds.

    A slow moment of the machine meets all candidates alike, and the least of many rounds is
    what is left when none did.
    """
    for step in steps.values():
        for _ in range(warm):
            step()
    least = dict.fromkeys(steps, float("inf"))
    for _ in range(rounds):
        for name, step in steps.items():
            for _ in range(_RUNS_A_TURN):
                start = time.thread_time()
                step()
                least[name] = min(least[name], (time.thread_time() - start) * 1e6)
    return least
