"""Operators of known amounts: noted where they run, and added up many at once.

Note [Noting]
Between operators, which take the processor's caches for themselves, the same work takes several
times as long as on its own. So what is done at each operator is written out in one function, with
what it reads bound once, and everything that can be done later is done for many together.
Rule 1: it notes what `Attribution.attribute_op` would say, in the thread that is counted. It has
        answers for the common cases, and leaves all others to whoever is told of operators.
Rule 2: only shapes are looked at. Whether they say everything was found out for the dispatcher's
        keys: dense tensors with data, which no class of torch's stands in for.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from itertools import repeat
from threading import get_ident as this_thread
from typing import Any

from torch import is_grad_enabled

from .._attribution import BACKWARD, FORWARD, OUTSIDE, RECOMPUTE, Attribution
from .._record import Path
from .._thread_state import ThreadState
from .._torch_compat import current_node, graph_task, next_number, number_of
from ._operator_watch import Kernel, Place, thread_here

MOST_NOTED = 512
"""Operators that are noted before they are added up; as many fit into a processor's cache."""

Known = tuple[int, str]
"""Amount and name of an operator of known shapes."""

_SHAPE = repeat("shape")


class Notes:
    """What ran in the thread that made them.

    Args:
        attribution: where that thread is.
        add: called with what is known of an operator, path, phase, and how often it ran there.

    Attributes:
        state: of the thread, once it is followed.
        here: operators with the path of the running call, and whether no backward ran.
        numbered: operators of a backward, with the number of the node that ran.
    """

    def __init__(
        self, attribution: Attribution, add: Callable[[Known, Path, str, int], None]
    ) -> None:
        self.attribution = attribution
        self.state: ThreadState | None = None
        self.here: list[tuple[Known, Path, bool]] = []
        self.numbered: list[tuple[Known, int]] = []
        self._add = add

    def follow(self, state: ThreadState) -> None:
        """Begin, in the thread that has this state."""
        if self.state is None:
            self.state = state
            state.record.before_drop = self.add_up

    def add_up(self) -> None:
        """Add everything up; nothing is noted after that."""
        # Emptied first: an interrupt then loses something, and counts nothing twice.
        here, numbered = self.here[:], self.numbered[:]
        self.here.clear()
        self.numbered.clear()
        # Alike ones are added once: counting them is done in C.
        for (known, path, forward), times in Counter(here).items():
            if not forward:
                self._add(known, path, RECOMPUTE, times)
            else:
                self._add(known, path, OUTSIDE if path.parent is None else FORWARD, times)
        if numbered and self.state is not None:
            starts, calls = self.state.record.starts, self.state.record.calls
            # `Record.find`, written out
            found = [(known, calls[bisect_right(starts, at) - 1][0]) for known, at in numbered]
            for (known, path), times in Counter(found).items():
                self._add(known, path, BACKWARD, times)


def noting(notes: Notes, by_shapes: dict[Any, Known], place: Place) -> Kernel:
    """Return a kernel that notes an operator of known shapes, and leaves others to the place's own.

    See Note [Noting].

    Args:
        notes: of this thread.
        by_shapes: what is known, by shapes and numbers among the arguments.
        place: of the operator.
    """
    thread, ident, attribution = thread_here(), this_thread(), notes.attribution
    compiling, run, keys_below, told = thread.compiling, place.run, place.dense, place.told
    here: list[Any] = notes.here
    numbered: list[Any] = notes.numbered
    most = MOST_NOTED

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        if thread.inside or place.shared or this_thread() != ident or compiling() is not None:
            return told(keys, *args, **kwargs)
        number_given = 0 if kwargs else len(args)
        try:
            below = keys_below[keys.raw_repr()]
            # Products have two or three matrices: written out, they take half as long.
            if number_given == 2:
                first, second = args
                known = by_shapes[first.shape, second.shape]
            elif number_given == 3:
                first, second, third = args
                known = by_shapes[first.shape, second.shape, third.shape]
            else:
                shapes = map(getattr, args, _SHAPE, args)
                key = (*shapes, *kwargs.values(), *kwargs)
                known = by_shapes[key]
            state: Any = notes.state
            task = graph_task()
            if task == state.task:
                if state.owner is not None or state.shown is not None:
                    return told(keys, *args, **kwargs)
                noted = here
                noted.append((known, state.call[0], task < 0))
            else:
                if is_grad_enabled() or not attribution.numbered or state.shown is not None:
                    return told(keys, *args, **kwargs)
                number = number_of(current_node())
                if number >= state.number:
                    return told(keys, *args, **kwargs)
                noted = numbered
                noted.append((known, number))
            state.seen = next_number()
        except (AttributeError, KeyError, RuntimeError, TypeError):
            return told(keys, *args, **kwargs)
        if len(noted) >= most:
            notes.add_up()
        thread.inside = True
        try:
            if number_given == 2:
                return run(below, first, second)
            if number_given == 3:
                return run(below, first, second, third)
            return run(below, *args, **kwargs)
        finally:
            thread.inside = False

    return kernel
