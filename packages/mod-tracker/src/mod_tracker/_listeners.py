"""Who listens to which events of which modules.

Whether a listener is interested in a path is decided once, when the path is made or a listener
comes or goes, and kept on the path as `PathListeners`. A path nobody listens to has none, and a
call on it does no work for events at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from itertools import accumulate

from ._record import Path

Callback = Callable[..., object]


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a module's name, or its state_dict prefix below the root, matches a pattern.

    Example:
        >>> matches("Encoder.layers.0", ["layers.*"]), matches("Encoder", ["layers.*"])
        (True, False)
    """
    key = name.partition(".")[2]
    return any(fnmatchcase(name, pattern) or fnmatchcase(key, pattern) for pattern in patterns)


@dataclass(frozen=True)
class Filter:
    """Which modules a listener wants to hear of.

    Attributes:
        include: patterns of which one must match the name; () for every name.
        exclude: patterns of which none may match the name.
        max_depth: largest number of modules on the path; None for any.
        types: classes of which the module must be an instance; () for any.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    max_depth: int | None = None
    types: tuple[type, ...] = ()

    def accepts(self, path: Path) -> bool:
        """Whether calls on this path pass."""
        if self.max_depth is not None and path.depth > self.max_depth:
            return False
        if self.types and not isinstance(path.module(), self.types):
            return False
        if self.include and not matches(path.name, self.include):
            return False
        return not matches(path.name, self.exclude)


@dataclass(frozen=True)
class Callbacks:
    """What to call, each with the module, or None if it is gone, and then:

    pre_forward `(args, kwargs)`, post_forward `(args, kwargs, output)`, pre_backward and
    post_backward `(grads,)`. Which call it is, the attribution says meanwhile. `pre_hook` `(args,)`
    and `post_hook` `(args, output)` come after pre_forward and post_forward: torch's hooks get no
    keyword arguments, and an adapter for each would be two more frames per call. `switched` gets
    `(call, phase)` whenever another call runs.
    """

    pre_forward: Callback | None = None
    post_forward: Callback | None = None
    pre_backward: Callback | None = None
    post_backward: Callback | None = None
    pre_hook: Callback | None = None
    post_hook: Callback | None = None
    switched: Callback | None = None


@dataclass(frozen=True)
class PathListeners:
    """The callbacks interested in one path, in order of registration.

    Attributes:
        slow_path: whether calls need `call_slow_path`, the long way around a call: where each
            change of the running call is told beside other events, and where more threads than one
            run modules.
        switches: whether nobody asks for anything but changes of the running call, for which a
            forward has a short way: it is what `profile_time` and `trace` cost.
        entries: for each of `post_forward`, how many of `pre_forward` were told before it waits for
            an exit: those registered earlier, and its own.
        backward: whether anybody asks when the module is entered and left in backward.
    """

    slow_path: bool
    pre_forward: tuple[Callback, ...] = ()
    post_forward: tuple[Callback, ...] = ()
    pre_backward: tuple[Callback, ...] = ()
    post_backward: tuple[Callback, ...] = ()
    pre_hook: tuple[Callback, ...] = ()
    post_hook: tuple[Callback, ...] = ()
    switched: tuple[Callback, ...] = ()
    entries: tuple[int, ...] = ()
    switches: bool = False
    backward: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "backward", bool(self.pre_backward or self.post_backward))

    def waiting(self, told: int) -> tuple[Callback, ...]:
        """Return who of `post_forward` waits for an exit once `told` of `pre_forward` were told."""
        pairs = zip(self.post_forward, self.entries, strict=True)
        return tuple(callback for callback, entry in pairs if entry <= told)


NOTHING = PathListeners(slow_path=True)

INTERNAL = PathListeners(slow_path=True)
"""Of graphs that torch.compile calls: such a call is not a module call."""


class Listeners:
    """Registered callbacks with their filters.

    Attributes:
        empty: whether nobody listens.
        switched: the callbacks that hear of every change of the running call.
    """

    def __init__(self) -> None:
        self._entries: tuple[tuple[Callbacks, Filter], ...] = ()
        self.empty = True
        self.switched: tuple[Callback, ...] = ()

    def add(self, callbacks: Callbacks, only: Filter) -> Callable[[], None]:
        """Register callbacks; the returned function takes them out again."""
        entry = (callbacks, only)
        self._set((*self._entries, entry))
        return lambda: self._set(kept for kept in self._entries if kept is not entry)

    def of(self, path: Path, *, slow_path: bool) -> PathListeners | None:
        """Return what a path has to tell, or None if nobody wants to know."""
        interested = [callbacks for callbacks, only in self._entries if only.accepts(path)]
        return collect(interested, slow_path=slow_path) if interested else None

    def _set(self, entries: Iterable[tuple[Callbacks, Filter]]) -> None:
        self._entries = tuple(entries)
        self.empty = not self._entries
        self.switched = collect((c for c, _ in self._entries), slow_path=False).switched


def collect(interested: Iterable[Callbacks], *, slow_path: bool) -> PathListeners:
    """Turn callbacks into one; `slow_path` if calls need the long way in any case.

    Example:
        >>> both = [Callbacks(pre_forward=print), Callbacks(post_backward=print)]
        >>> collect(both, slow_path=False).backward
        True
    """
    interested = list(interested)
    columns = {
        kind.name: tuple(
            callback
            for callbacks in interested
            if (callback := getattr(callbacks, kind.name)) is not None
        )
        for kind in fields(Callbacks)
    }
    switches = bool(columns["switched"]) and not slow_path
    others = any(found for kind, found in columns.items() if kind != "switched")
    before = accumulate(callbacks.pre_forward is not None for callbacks in interested)
    return PathListeners(
        **columns,
        slow_path=slow_path or (switches and others),
        switches=switches and not others,
        entries=tuple(
            told
            for told, callbacks in zip(before, interested, strict=True)
            if callbacks.post_forward is not None
        ),
    )
