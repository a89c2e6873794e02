"""Notices what a region does that its graph does not show, and remembers the function.

Under `no_grad`, or through `detach` or `.data`, a value changes and its node does not: what
reads it afterwards is not what a replay of the node gives. Where autograd saves such a value its
version shows it, but after `.data` not even that. Nor does a copy's node know in which memory
format it is; `contiguous` and `reshape` make it row-major, others may not.
So a function's first forward is watched for these habits (`Habit`), without what a gradient taken
in it runs again of others. What differs later shows in what is rebuilt.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from enum import Flag, auto
from typing import Any

import torch
from torch.utils.weak import TensorWeakRef

from ..._tensors import tensors_in
from ..._torch_compat import backward_id, base_of, storage_key
from ..._watching_mode import WatchingMode
from ...policies._operators import facts_of, is_custom
from ...policies._unmatched import subject_of
from ...policies._views import Operator
from .._guards import is_guarding


class Habit(Flag):
    """What a function does that its graph does not show."""

    NONE = 0
    COPIES = auto()
    """It copies in a format that is nowhere told: no copies are read at edges."""
    WRITES = auto()
    """It writes to its values where autograd does not see it: no operands are read at edges."""
    UNCOUNTED = auto()
    """It writes so past a version counter: nothing is replayed."""
    FORGETS = auto()
    """Large values are rebuilt with what its graph does not hold: see `_calls`."""
    KEEPS = auto()
    """Much of what it saves has no recipe: see `Region.learned`."""
    OPAQUE = auto()
    """The same under any policy, and it calls custom operators or is given wrapper subclasses."""
    WRAPS = auto()
    """Its parameters or arguments were wrapper subclasses: see `_wrappers`."""
    REWRITES = auto()
    """It writes to results that replays could read: they are not kept for that."""


_habits: dict[int, tuple[weakref.ref[Any], Habit]] = {}


def habits_of(function: object) -> Habit:
    """What earlier forwards of a function did."""
    return habits_behind(subject_of(function)) if _habits else Habit.NONE


def habits_behind(subject: object) -> Habit:
    """The same, by what stands for the function."""
    found = _habits.get(id(subject))
    return Habit.NONE if found is None else found[1]


def remember(function: object, habit: Habit) -> None:
    """Take note of what it does."""
    subject = subject_of(function)
    key = id(subject)
    gone = weakref.ref(subject, lambda _: _habits.pop(key, None) and None)
    _habits[key] = (gone, habits_of(function) | habit)


def _copies_oddly(op: Operator, args: Any, kwargs: Any) -> bool:
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
        self._fresh: list[TensorWeakRef] = []  # autograd says only later which need a gradient

    def follow(
        self, op: Operator, args: Any, kwargs: Any, out: Any
    ) -> tuple[Habit, list[torch.Tensor]]:
        """Note a call that ran; return what it did unseen, and what it wrote to uncounted."""
        grads = torch.is_grad_enabled()
        facts = facts_of(op)
        for each in (reference() for reference in self._fresh):
            # A view is not asked: torch may be making its node, under a lock, by this very call.
            if each is not None and each.requires_grad and (each._is_view() or not each.is_leaf):
                self._tracked.add(storage_key(each))
        self._fresh = list(map(TensorWeakRef, tensors_in(out)))
        unseen = [
            each
            for each in facts.written(args, kwargs)
            if not (grads and each.requires_grad) and self._is_tracked(each)
        ]
        for each in tensors_in((args, kwargs)):
            if each.requires_grad and not each.is_leaf:
                self._tracked.add(storage_key(each))
        for each in tensors_in(out):
            if not each.requires_grad and not (facts.is_view or facts.writes or facts.bookkeeping):
                self._tracked.discard(storage_key(each))  # of one that is gone
        uncounted = [each for each in unseen if not _counted(each)]
        habit = Habit.COPIES if _copies_oddly(op, args, kwargs) else Habit.NONE
        if unseen:
            habit |= Habit.WRITES | (Habit.UNCOUNTED if uncounted else Habit.NONE)
        return habit, uncounted

    def _is_tracked(self, tensor: torch.Tensor) -> bool:
        if tensor.requires_grad and not tensor.is_leaf:
            return True
        return storage_key(tensor) in self._tracked


def _counted(tensor: torch.Tensor) -> bool:
    """Whether it has the version counter of what has a gradient: `.data` has one of its own."""
    base = base_of(tensor)
    return (tensor if base is None else base).requires_grad


class Observer(WatchingMode):
    """Watches a function's first forward.

    Attributes:
        ops: which operators ran, and how often.
    """

    def __init__(
        self,
        function: object,
        tell: Callable[[Habit], None],
        wrote: Callable[[list[torch.Tensor]], None],
    ) -> None:
        super().__init__()
        self.ops: Counter[Operator] = Counter()
        self._function = function
        self._tell = tell
        self._wrote = wrote
        self._writes = Writes()
        self._backward = backward_id()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        if is_guarding() or facts_of(func).geometry:
            return func(*args, **given)
        self.ops[func] += 1
        if is_custom(func):
            self._tell(Habit.OPAQUE)
        out = func(*args, **given)
        if backward_id() != self._backward:
            return out
        habit, written = self._writes.follow(func, args, given, out)
        if habit:
            self._tell(habit)
            self._wrote(written)
            remember(self._function, habit)
        return out
