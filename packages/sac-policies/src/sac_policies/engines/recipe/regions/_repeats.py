"""What forwards of functions do, under one policy: written down for each, and followed.

Rule 1. Steps are of a function, with inputs of these shapes. Who leaves its steps again and again
        is not written down any more.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ...._tensors import tensors_in
from .._own_rules import when_changed
from .._recipes import reader
from .._replay_entries import ReplayTable
from .._writes import Habit
from ._recorded import RecordedRegion, Shape
from ._region import Region
from ._repeated import Repeated

_MOST_LEFT, _MOST_SHAPES = 3, 8


_all: weakref.WeakSet[Repeats] = weakref.WeakSet()


@when_changed
def _forget(kind: type) -> None:
    """Write down anew what a rule is changed for."""
    del kind
    for each in tuple(_all):
        each.forget()


_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


def _given(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
    """What a function is given: it may put what it makes into a list or dict of these, a cache."""
    return tuple(tensors_in((args, kwargs)))


class Repeats:
    """Forwards of functions under one policy that decides by operators alone."""

    def __init__(self, entries: ReplayTable) -> None:
        self._entries, self._read = entries, reader(entries.policy)
        self._known: dict[int, tuple[weakref.ref[Any], dict[Any, Shape]]] = {}
        _all.add(self)

    def forget(self) -> None:
        """Write all down anew."""
        self._known.clear()

    def run(
        self,
        function: Callable[..., Any],
        subject: object,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        habits: Habit,
    ) -> Any:
        """Call a function whose first forward is over, outside of others' hooks.

        Args:
            function: the region's.
            subject: what stands for it.
            args: its positional arguments.
            kwargs: its keyword arguments.
            habits: what earlier forwards did.
        """
        shape = self._shape(subject, habits, args)
        given = args if not kwargs and _PLAIN.issuperset(map(type, args)) else _given(args, kwargs)
        if shape is not None and shape.steps is not None:
            out, is_whole = self._follower(shape, habits, given).run(function, args, kwargs)
            if is_whole:
                shape.followed += 1
            else:
                shape.leave()
            return out
        if shape is None or shape.left >= _MOST_LEFT:
            region = self._decider(given)
            region.mind(habits)
            return region.run(function, args, kwargs)
        recorded = self._recorder(given)
        recorded.mind(habits)
        out = recorded.run(function, args, kwargs)
        shape.steps, shape.heeds, shape.notes = recorded.steps, recorded.heeds, recorded.notes
        if recorded.steps is None:
            shape.left = _MOST_LEFT
        return out

    def _follower(self, shape: Shape, habits: Habit, given: Any) -> Repeated:
        return Repeated(shape, self._entries, self._read, habits, given)

    def _recorder(self, given: Any) -> RecordedRegion:
        return RecordedRegion(self._entries, given)

    def _decider(self, given: Any) -> Region:
        return Region(self._entries, given)

    def _shape(self, subject: object, habits: Habit, args: tuple[Any, ...]) -> Shape | None:
        found = self._known.get(id(subject))
        shapes = self._begin(subject) if found is None else found[1]
        inputs: list[Any] = [] if habits is Habit.NONE else [habits]  # slow to hash
        for each in args:
            if isinstance(each, torch.Tensor):
                if each.is_nested:  # it has no shape, or another one each time
                    return None
                inputs.append((each.shape, each.requires_grad))
        key = tuple(inputs)
        shape = shapes.get(key)
        if shape is None and len(shapes) < _MOST_SHAPES:
            shape = shapes[key] = Shape()
        return shape

    def _begin(self, subject: object) -> dict[Any, Shape]:
        known, key = self._known, id(subject)
        shapes: dict[Any, Shape] = {}
        known[key] = weakref.ref(subject, lambda _: known.pop(key, None) and None), shapes
        return shapes
