"""The five causes of memory.

Note [Logits and loss]
The last layer with a weight matrix computes the logits. Its allocations, and all later ones, are
"logits and loss" until the backward reaches another module with parameters. Only the end of the
forward shows which layer is the last one. So allocations are numbered, and the ranges of numbers
that are "logits and loss" are recorded.
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
    """Ranges of allocations that are logits or loss. See Note [Logits and loss]."""

    def __init__(self) -> None:
        self._weights: dict[Path, int] = {}
        self._spans: list[tuple[int, int]] = []
        self._call: Call | None = None
        self._root: Call | None = None
        self._start = -1

    def allocates(self, number: int, call: Call, phase: str) -> None:
        """Handle allocation number `number`, made by `call`."""
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
        if 0 <= self._start <= number:
            return True
        at = bisect_right(self._spans, (number, number)) - 1
        spans = self._spans[max(at, 0) : at + 2]
        return any(start <= number < end for start, end in spans)


def _most_dimensions(path: Path) -> int:
    module = path.module()
    held: Iterable = () if module is None else parameters_of(module).values()
    return max((each.dim() for each in held if each is not None), default=0)
