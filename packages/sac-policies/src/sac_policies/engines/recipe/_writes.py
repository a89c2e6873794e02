"""Notices what a region does that its graph does not show, and remembers the function.

Under `no_grad`, or through `detach` or `.data`, a value changes and its node does not: what
reads it afterwards is not what a replay of the node gives. Where autograd saves such a value its
version shows it; an operand that nobody saves is nowhere looked at. Nor does a copy's node know
in which memory format it is; `contiguous` and `reshape` make it row-major, others may not.
So a function's first forward is watched: one that writes so has no operands read through edges,
one that copies so no copies on the way to an operand. What differs later shows in what is rebuilt.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..._tensors import tensors_in
from ..._torch_compat import storage_key
from ...policies._operators import facts_of
from ...policies._unmatched import subject_of
from ...policies._views import Operator
from .._guards import is_guarding

_UNSEEN, _ODD = 1, 2
_habits: dict[int, tuple[weakref.ref[Any], int]] = {}


def habits_of(function: object) -> tuple[bool, bool]:
    """Whether an earlier forward of a function wrote unseen, and whether it copied oddly."""
    if not _habits:
        return False, False
    found = _habits.get(id(subject_of(function)))
    habits = 0 if found is None else found[1]
    return bool(habits & _UNSEEN), bool(habits & _ODD)


def remember(function: object, *, writes: bool, copies: bool) -> None:
    """Take note that it does."""
    subject = subject_of(function)
    key = id(subject)
    before = _habits[key][1] if key in _habits else 0
    gone = weakref.ref(subject, lambda _: _habits.pop(key, None) and None)
    _habits[key] = (gone, before | _UNSEEN * writes | _ODD * copies)


def copies_oddly(op: Operator, args: Any, kwargs: Any) -> bool:
    """Whether a call makes a copy in a format that its node does not tell."""
    if op is not _CLONE and op is not _TO_COPY:
        return False
    wanted = kwargs.get("memory_format")
    if op is _TO_COPY:
        return wanted not in (None, torch.preserve_format)
    return wanted is not torch.contiguous_format and not (
        wanted in (None, torch.preserve_format) and args[0].is_contiguous()
    )


_CLONE, _TO_COPY = torch.ops.aten.clone.default, torch.ops.aten._to_copy.default


class Writes:
    """Follows the operators of one forward."""

    def __init__(self) -> None:
        self._tracked: set[int] = set()

    def follow(self, op: Operator, args: Any, kwargs: Any, out: Any) -> bool:
        """Note a call that ran; whether it wrote to a value of the region unseen by autograd."""
        grads = torch.is_grad_enabled()
        facts = facts_of(op)
        unseen = any(
            not (grads and each.requires_grad) and self._is_tracked(each)
            for each in facts.written(args, kwargs)
        )
        for each in tensors_in((args, kwargs)):
            if each.requires_grad and not each.is_leaf:
                self._tracked.add(storage_key(each))
        for each in tensors_in(out):
            if not each.requires_grad and not (facts.is_view or facts.writes or facts.bookkeeping):
                self._tracked.discard(storage_key(each))  # of one that is gone
        return unseen

    def _is_tracked(self, tensor: torch.Tensor) -> bool:
        if tensor.requires_grad and not tensor.is_leaf:
            return True
        return storage_key(tensor) in self._tracked


class Observer(TorchDispatchMode):
    """Watches a function's first forward.

    Attributes:
        ops: which operators ran, and how often.
    """

    def __init__(self, function: object, tell: Callable[[bool, bool], None]) -> None:
        super().__init__()
        self.ops: Counter[Operator] = Counter()
        self._function = function
        self._tell = tell
        self._writes = Writes()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        if is_guarding():
            return func(*args, **given)
        self.ops[func] += 1
        out = func(*args, **given)
        writes = self._writes.follow(func, args, given, out)
        copies = copies_oddly(func, args, given)
        if writes or copies:
            self._tell(writes, copies)
            remember(self._function, writes=writes, copies=copies)
        return out
