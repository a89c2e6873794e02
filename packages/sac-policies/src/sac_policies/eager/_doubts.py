"""Comparisons on an accelerator, of which nobody asks the result before the backward ends.

Rule 1. To ask would make the host wait for the device's queue, at each replay.
Rule 2. What is compared word by word waits for more of the same stream, up to a bound: then all is
        compared at once, and one number says where the first difference is.
Rule 3. Who made the words of another stream has been waited for when the backward has ended.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from .._torch_compat import after_backward, backward_id
from .._torch_compat._dispatch import no_dispatch

BLOCK_WORDS, MOST_WORDS = 64, 1 << 17
"""What an allocator gives at the least, and how much may wait, in words of eight bytes."""


class _Waiting:
    """Fingerprints that are to be compared, on one stream of a device."""

    __slots__ = ("errors", "prints", "words")

    def __init__(self) -> None:
        self.prints: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.errors: list[Callable[[], Exception]] = []
        self.words = 0


class _Doubts:
    """Comparisons whose results lie on an accelerator, until the backward they are of ends.

    The engine holds them: it drops them with a backward that fails. Where one backward runs inside
    another each has its own, and the thread that ends a backward need not be the one that compared.
    """

    __slots__ = ("__weakref__", "_asked", "_waiting")

    def __init__(self) -> None:
        self._asked: list[tuple[torch.Tensor, Callable[[int], Callable[[], Exception] | None]]] = []
        self._waiting: defaultdict[Any, _Waiting] = defaultdict(_Waiting)

    def ask(self, same: torch.Tensor, error: Callable[[], Exception]) -> None:
        """Note what says whether two tensors are the same."""
        self._asked.append((same, lambda is_same: None if is_same else error))

    def compare(
        self, before: torch.Tensor, after: torch.Tensor, error: Callable[[], Exception]
    ) -> None:
        """Have two fingerprints of one length compared, with others of their stream (Rule 4)."""
        key = _stream_of(after.device)
        waiting = self._waiting[key]
        waiting.prints.append((before, after))
        waiting.errors.append(error)
        waiting.words += max(BLOCK_WORDS, len(after))
        if waiting.words > MOST_WORDS:
            self._compare(self._waiting.pop(key))

    def _compare(self, waiting: _Waiting) -> None:
        ends = list(accumulate(len(after) for _, after in waiting.prints))
        with no_dispatch(), torch.no_grad():
            before, after = map(torch.cat, zip(*waiting.prints, strict=True))
            differ = before != after
            first = torch.where(differ.any(), differ.view(torch.uint8).argmax(), -1)
        self._asked.append((first, partial(_first_error, ends, waiting.errors)))

    def settle(self) -> None:
        """Raise for the first that found a difference."""
        waiting = list(self._waiting.values())  # until their streams have been waited for
        for each in waiting:
            self._compare(each)
        for answer, error_of in self._asked:
            error = error_of(int(answer))
            if error is not None:
                raise error()


def _first_error(
    ends: list[int], errors: list[Callable[[], Exception]], at: int
) -> Callable[[], Exception] | None:
    """Whose words the first difference is among, -1 without one."""
    return None if at < 0 else errors[bisect_right(ends, at)]


def _stream_of(device: torch.device) -> Any:
    """What runs the work that is queued now: what waits there is compared there."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != device.type:
        return device
    return device, torch.accelerator.current_stream(device).stream_id


_doubts: weakref.WeakValueDictionary[int, _Doubts] = weakref.WeakValueDictionary()
"""By the number of the backward."""


def doubts_here() -> _Doubts | None:
    """Those of the backward that runs, looked at when it ends; None where nobody would."""
    backward = backward_id()
    doubts = _doubts.get(backward)
    if doubts is None:
        doubts = _Doubts()
        if backward < 0 or not after_backward(doubts.settle):
            return None
        _doubts[backward] = doubts
    return doubts
