"""Calls of chosen operators, seen without looking at any other. The only place that registers any.

Note [Watched operators]
A dispatch mode is told of every operator, in Python, which for small tensors takes three times as
long as the operators do. A kernel of ours right before that of the device is called for one
operator, and the others are as fast as ever.
Rule 1: every operator is registered once, however many watch it, and unregistered with the last
        of them. That changes a table that torch reads without a lock: an operator that another
        thread has begun, and whose kernel it has not looked up yet, would find none. So threads
        that have run one before wait in ours for the moment that the change takes. Beginning is
        safe: torch enters the kernel before it says that there is one.
Rule 2: what an operator that is watched does inside is not seen again.
Rule 3: of nested tensors, which have no shape to tell, the operators on their parts are seen.
Rule 4: what torch.compile tries out is not seen. Of tensors that stand in for those with data, as
        under `FakeTensorMode`, a result is often remembered and nothing runs; so a watcher is only
        told that there are such.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch

from .._torch_compat import can_intercept, compile_question, intercept, is_dense, is_stand_in

Kernel = Callable[..., Any]
"""Called in place of an operator's own kernel, with the dispatcher's keys before the arguments."""


class Watcher(Protocol):
    """Is told of an operator."""

    def shortcut(self, operator: Any, place: Place) -> Kernel:
        """Return what does the watcher's work without being told, or else calls `place.told`."""

    def begins(self, operator: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Look at the arguments; what is returned is given to `ends`, unless it is None."""

    def ends(
        self, begun: Any, operator: Any, args: tuple, kwargs: dict[str, Any], out: Any
    ) -> None:
        """Look at the result."""

    def stood_in(self) -> None:
        """Note that tensors without data were given to an operator."""


class Place:
    """Who watches one operator, what is called for it, and what unregisters that.

    Attributes:
        watchers: those who watch it now.
        shared: whether `watchers` are not, or no more, the one it was registered for.
        leaving: whether nobody watches it any more; see Rule 1.
        told: tells all watchers, and runs the operator.
        run: runs it, with the keys below.
        dense: keys below, by the bits of the keys; only those of dense tensors with data.
    """

    __slots__ = ("dense", "leaving", "run", "shared", "told", "undo", "watchers")
    told: Kernel
    run: Kernel

    def __init__(self) -> None:
        self.undo: Callable[[], None] | None = None
        self.watchers: tuple[Watcher, ...] = ()
        self.shared = self.leaving = False
        self.dense: dict[int, Any] = {}


class Thread:
    """What one thread does.

    Attributes:
        inside: whether an operator that is watched runs; see Rule 2.
        compiling: says what torch.compile is at work on; see Rule 4.
    """

    __slots__ = ("__weakref__", "compiling", "inside")

    def __init__(self) -> None:
        self.inside = False
        self.compiling = compile_question()


class _Local(threading.local):
    def __init__(self) -> None:
        self.thread = Thread()
        _threads.add(self.thread)


class _Gate:
    """Where other threads wait while operators are unregistered; see Rule 1.

    A thread that does not come within `PATIENCE_S` is taken to run none of these: most often it
    rests, as a backward thread does between two backwards.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting = 0
        self._owner: int | None = None

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Have other threads wait in `wait` meanwhile, those that ran such an operator before."""
        others = len(_threads) - (_local.thread in _threads)
        self._owner = threading.get_ident()
        try:
            with self._changed:
                while self._waiting < others and self._changed.wait(PATIENCE_S):
                    pass
            yield
        finally:
            self._owner = None
            with self._changed:
                self._changed.notify_all()

    def wait(self) -> None:
        """Wait until it is open."""
        if self._owner in (None, threading.get_ident()):
            return
        with self._changed:
            self._waiting += 1
            self._changed.notify_all()
            try:
                # In a process that was forked meanwhile, nobody else would open it.
                if not self._changed.wait_for(lambda: self._owner is None, LIMIT_S):
                    self._owner = None
            finally:
                self._waiting -= 1


PATIENCE_S, LIMIT_S = 0.02, 1.0
_lock = threading.RLock()
_places: dict[Any, Place] = {}
_threads: weakref.WeakSet[Thread] = weakref.WeakSet()
_local = _Local()
_gate = _Gate()
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Watch:
    """Ends when it is called, and at the latest with its last reference.

    An interrupt may keep the call from doing all of it, or from being made, or this from being
    made.
    """

    _taken: tuple[Any, ...] = ()

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher

    def take(self, operator: Any) -> bool:
        """Begin with an operator; whether that is possible."""
        self._taken = *self._taken, operator
        return _take(operator, self._watcher)

    def __call__(self) -> None:
        """End it; nothing happens a second time."""
        with _lock:
            left = [place for each in self._taken if (place := _leave(each, self._watcher))]
            if left:
                with _gate.closed():
                    while left:
                        _unregister(left.pop())
            self._taken = ()

    __del__ = __call__


def watch(operators: Iterable[Any], watcher: Watcher) -> Watch | None:
    """Tell a watcher of all calls of some operators.

    Returns:
        What ends it; None if one of the operators cannot be watched.
    """
    if not can_intercept():
        return None
    watching = Watch(watcher)
    with _lock:
        if all(map(watching.take, operators)):
            return watching
    watching()
    return None


def thread_here() -> Thread:
    """Return what this thread does."""
    return _local.thread


def _take(operator: Any, watcher: Watcher) -> bool:
    place = _places.setdefault(operator, Place())
    place.shared = place.undo is not None
    place.leaving = False
    if place.undo is None:
        place.undo = intercept(operator, partial(_kernel, operator, place, watcher))
        if place.undo is None:
            return False
    place.watchers = (*place.watchers, watcher)
    return True


def _leave(operator: Any, watcher: Watcher) -> Place | None:
    """End with an operator; its place, if nobody watches it any more."""
    place = _places.get(operator)
    if place is None:  # interrupted before there was one
        return None
    place.shared = True
    place.watchers = tuple(each for each in place.watchers if each is not watcher)
    if place.watchers or place.undo is None:
        return None
    place.leaving = True
    return place


def _unregister(place: Place) -> None:
    if place.undo is not None:
        place.undo()
        place.undo = None


def _kernel(operator: Any, place: Place, watcher: Watcher, run: Kernel, below: Any) -> Kernel:
    """Return what is called for the operator: the shortcut of who watches it first."""
    local = _local

    def told(keys: Any, *args: Any, **kwargs: Any) -> Any:
        bits, keys = keys.raw_repr(), keys & below
        thread = local.thread
        if thread.inside or thread.compiling() is not None:
            return run(keys, *args, **kwargs)
        if place.leaving:
            _gate.wait()
        watchers = place.watchers
        if not _is_whole(args, watchers):
            return run(keys, *args, **kwargs)
        if is_dense(keys):
            place.dense[bits] = keys
        begun = [watcher.begins(operator, args, kwargs) for watcher in watchers]
        thread.inside = True
        try:
            out = run(keys, *args, **kwargs)
        finally:
            thread.inside = False
        for watcher, token in zip(watchers, begun, strict=True):
            if token is not None:
                watcher.ends(token, operator, args, kwargs, out)
        return out

    place.run, place.told = run, told
    return watcher.shortcut(operator, place)


def _is_whole(args: tuple, watchers: Iterable[Watcher]) -> bool:
    # See Rules 3 and 4.
    for value in args:
        if not isinstance(value, torch.Tensor):
            continue
        if type(value) not in _PLAIN and is_stand_in(type(value)):
            for watcher in watchers:
                watcher.stood_in()
            return False
        if value.is_nested:
            return False
    return True
