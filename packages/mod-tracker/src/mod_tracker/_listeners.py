"""Listeners of module calls, and the paths they listen to.

The listeners of a path are looked up once, when the path is created or a listener is added or
removed, and stored on the path as `PathListeners`. Calls on a path without listeners do no work for
events.

Note [Listeners that fail]
- An `Exception` of a listener does not reach the model. It is logged, the subscription ends, and
  `Subscription.error` has it.
- Other exceptions, such as a KeyboardInterrupt, reach the caller of the model.
- Exceptions of hooks of `register_user_hooks` reach the caller, as in torch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from ._record import Path

_log = logging.getLogger("mod_tracker")

Callback = Callable[..., object]


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a pattern matches a module's name or its state_dict prefix below the root.

    Example:
        >>> matches("Encoder.layers.0", ["layers.*"]), matches("Encoder", ["layers.*"])
        (True, False)
    """
    key = name.partition(".")[2]
    return any(fnmatchcase(name, pattern) or fnmatchcase(key, pattern) for pattern in patterns)


@dataclass(frozen=True)
class Listener:
    """Callbacks and filters of one subscription: the options of `ModTracker.subscribe`.

    Each callback gets the module, or None if the module was freed, and: pre_forward
    `(args, kwargs)`, post_forward `(args, kwargs, output)`, pre_backward and post_backward
    `(grads,)`. During the callback `Attribution.locate` returns the call. `switched` gets
    `(call, phase)` whenever another call runs.
    """

    pre_forward: Callback | None = None
    post_forward: Callback | None = None
    pre_backward: Callback | None = None
    post_backward: Callback | None = None
    switched: Callback | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    max_depth: int | None = None
    types: tuple[type, ...] = ()

    def accepts(self, path: Path) -> bool:
        if self.max_depth is not None and len(path.stack) > self.max_depth:
            return False
        if self.types and not isinstance(path.module(), self.types):
            return False
        if self.include and not matches(path.name, self.include):
            return False
        return not (self.exclude and matches(path.name, self.exclude))


@dataclass(frozen=True)
class PathListeners:
    """The callbacks of one path, in order of registration.

    Attributes:
        forward: pairs of `pre_forward` and `post_forward`. If a `pre_forward` raises, the
            `post_forward` callbacks of the pairs before it are called.
    """

    forward: tuple[tuple[Callback | None, Callback | None], ...] = ()
    pre_backward: tuple[Callback, ...] = ()
    post_backward: tuple[Callback, ...] = ()
    switched: tuple[Callback, ...] = ()


NOTHING = PathListeners()

INTERNAL = PathListeners()
"""Marks graphs that torch.compile calls: such a call is not a module call."""


class Listeners:
    """All registered listeners."""

    def __init__(self) -> None:
        self._listeners: tuple[Listener, ...] = ()
        self._all: PathListeners | None = None
        self.switched: tuple[Callback, ...] = ()

    def add(self, listener: Listener) -> Callable[[], None]:
        """Register a listener and return a function that removes it."""
        self._set((*self._listeners, listener))
        return lambda: self._set(kept for kept in self._listeners if kept is not listener)

    def of(self, path: Path) -> PathListeners | None:
        """Return the listeners of a path, or None if it has none."""
        interested = [listener for listener in self._listeners if listener.accepts(path)]
        if len(interested) == len(self._listeners):
            return self._all
        return collect(interested) if interested else None

    def _set(self, listeners: Iterable[Listener]) -> None:
        self._listeners = tuple(listeners)
        everything = collect(self._listeners)
        self._all, self.switched = everything if self._listeners else None, everything.switched


def collect(interested: Sequence[Listener]) -> PathListeners:
    def those(kind: str) -> tuple[Callback, ...]:
        found = (getattr(listener, kind) for listener in interested)
        return tuple(callback for callback in found if callback is not None)

    pairs = ((listener.pre_forward, listener.post_forward) for listener in interested)
    return PathListeners(
        forward=tuple(pair for pair in pairs if pair != (None, None)),
        pre_backward=those("pre_backward"),
        post_backward=those("post_backward"),
        switched=those("switched"),
    )


class Subscription:
    """A registered listener. Ends with `remove()`, or with the `with` block it is used in.

    Attributes:
        error: the exception that the listener raised, or None. A listener that raised is not called
            again. The exception has no traceback, which would keep tensors alive; the log has it.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None
        self._remove: Callable[[], None] | None = None

    def remove(self) -> None:
        """Stop listening. Calling it twice is allowed."""
        if self._remove is not None:
            self._remove()
            self._remove = None

    def _guard(self, listener: Callable[..., object]) -> Callable[..., None]:
        """Wrap a listener so that its errors do not reach the model. See the note above."""

        def call(*args: Any) -> None:
            if self.error is None:
                try:
                    listener(*args)
                except Exception as error:
                    self._fail(error)

        return call

    def _fail(self, error: Exception) -> None:
        _log.error("a listener failed and is not called again", exc_info=error)
        self.error = error.with_traceback(None)
        self.remove()

    def __enter__(self) -> Subscription:
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()
