"""Notices writes to a region's values that autograd does not see, and remembers the function.

Under `no_grad`, or through `detach` or `.data`, a value changes and its node does not: what
reads it afterwards is not what a replay of the node gives. Where autograd saves such a value its
version shows it; an operand that nobody saves is nowhere looked at. So a function's first
forward is watched, and one that writes so has no operands read through edges.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from ..._tensors import tensors_in
from ..._torch_compat import storage_key
from ...policies._operators import facts_of
from ...policies._unmatched import subject_of
from ...policies._views import Operator

_writing: dict[int, weakref.ref[Any]] = {}


def writes_unseen(function: object) -> bool:
    """Whether an earlier forward of this function wrote where autograd does not see it."""
    return bool(_writing) and id(subject_of(function)) in _writing


def remember(function: object) -> None:
    """Take note that it does."""
    subject = subject_of(function)
    key = id(subject)
    _writing[key] = weakref.ref(subject, lambda gone: _writing.pop(key, None) and None)


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
