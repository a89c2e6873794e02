"""Five causes of memory: what a large model's memory is spent on.

Note [Logits and loss]
The last layer with a weight matrix makes the logits. What it allocates, and what comes after it,
is "logits and loss", until the backward has reached another module with parameters. Which layer is
the last one is known only when the forward is over: until then the latest one may be. So the
allocations are numbered, and the numbers between which they are "logits and loss" are written down.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

from .._attribution import BACKWARD, FORWARD, RECOMPUTE
from .._record import Call, Path, root_of
from .._torch_compat import parameters_of

PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer"
ACTIVATIONS, LOGITS = "activations", "logits and loss"
CAUSES = (PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, LOGITS)


class LogitsAndLoss:
    """Finds the allocations of the last layer and of the loss. See Note [Logits and loss]."""

    def __init__(self) -> None:
        self._weights: dict[Path, int] = {}
        self._spans: list[tuple[int, int]] = []
        self._call: Call | None = None
        self._root: Call | None = None
        self._start = -1

    def allocates(self, number: int, call: Call, phase: str) -> None:
        """Note that a call makes allocation `number`."""
        if call is self._call or call[2] is None:
            return
        dimensions = self._weights.get(call[0])
        if dimensions is None:
            dimensions = self._weights[call[0]] = _most_dimensions(call[0])
        if not dimensions:
            return
        if phase in (BACKWARD, RECOMPUTE):
            self._close(number)
        elif phase == FORWARD and dimensions > 1:
            root = root_of(call)
            if root is not self._root:
                self._close(number)
            self._call, self._root, self._start = call, root, number

    def _close(self, number: int) -> None:
        if self._start >= 0:
            self._spans.append((self._start, number))
        self._call, self._root, self._start = None, None, -1

    def has(self, number: int) -> bool:
        """Whether allocation `number` is of the last layer or the loss."""
        if 0 <= self._start <= number:
            return True
        at = bisect_right(self._spans, (number, number)) - 1
        spans = self._spans[max(at, 0) : at + 2]
        return any(start <= number < end for start, end in spans)


def _most_dimensions(path: Path) -> int:
    module = path.module()
    held: Iterable = () if module is None else parameters_of(module).values()
    return max((each.dim() for each in held if each is not None), default=0)
