"""Paths, module calls, and each thread's record of which call created which autograd node.

Autograd numbers the nodes of a thread in order of creation. A call creates the nodes whose numbers
lie between the counter at its entry and the counter at its exit, without those of the calls inside
it. So whenever another call begins to run, the interval that ends there is recorded with the call
that ran in it.

- Intervals follow each other without gaps, so a lookup is one bisection of their starts.
- An empty interval is not recorded. Without gradients the counter does not advance, so inference
  records nothing.
- A record holds at most `limit` intervals. When it is full, the older half is dropped; nodes of
  dropped intervals are attributed to the outside.
- A record refers to no tensor, and to modules only weakly.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Optional

from torch import nn

from ._edges import Edge
from ._torch_compat import NO_TASK, new_carrier, next_number, number_asking

DEFAULT_LIMIT = 1 << 17
"""Intervals kept per thread; about 20 MB when full of distinct calls."""

# One call of a module: (path, number of earlier calls on that path, the call around it).
# A plain tuple, because one is made for every module call: a class costs five times as much.
Call = tuple["Path", int, Optional["Call"]]


class Path:
    """A module, and the path it was called from. Calls with the same nesting share a path.

    Attributes:
        module: returns the module, or None once it is freed.
        parent: the path around this one; None for the outside of all modules.
        name: canonical name of the module, "" for the outside.
        called_as: name built from the names by which this path was reached.
        stack: canonical names from the root to this module; () for the outside.
        children: paths below, by `id` of the module.
        keys: state_dict prefixes of the modules below this one, by `id`, once needed.
        last: the latest call on this path.
        uncounted: calls that `last` counts and that were not in forward.
        internal: whether this is a graph that torch.compile calls; such a call is no module call.
        guard: weak reference that removes the path from `parent.children` when the called object
            is freed. Otherwise a new object with the same `id` would get this path.
    """

    __slots__ = (
        "called_as",
        "children",
        "guard",
        "internal",
        "keys",
        "last",
        "module",
        "name",
        "parent",
        "stack",
        "uncounted",
    )

    def __init__(
        self,
        module: Callable[[], Any],
        *,
        parent: Path | None = None,
        name: str = "",
        called_as: str = "",
    ) -> None:
        self.module = module
        self.parent = parent
        self.name = name
        self.called_as = called_as
        self.stack: tuple[str, ...] = () if parent is None else (*parent.stack, name)
        self.children: dict[int, Path] = {}
        self.keys: dict[int, str] = {}
        self.last: Call = (self, -1, None)
        self.uncounted = 0
        self.internal = False
        self.guard: Any = None

    @property
    def calls(self) -> int:
        """Number of calls on this path, without those in recomputation."""
        return self.last[1] + 1 - self.uncounted

    def chain(self) -> Iterator[Path]:
        """Yield this path and those around it, innermost first, without the outside."""
        path = self
        while path.parent is not None:
            yield path
            path = path.parent

    def modules(self) -> Iterator[Any]:
        """Yield the living modules of this path, innermost first."""
        for path in self.chain():
            module = path.module()
            if module is not None:
                yield module

    def walk(self) -> Iterator[Path]:
        """Yield this path and all below it."""
        yield self
        for child in list(self.children.values()):
            yield from child.walk()


def outside() -> Call:
    """Return the call that represents code outside every module."""
    return (Path(lambda: None), 0, None)


def root_of(call: Call) -> Call:
    """Return the outermost module call around `call`; the outside for the outside."""
    while call[2] is not None and call[2][2] is not None:
        call = call[2]
    return call


def recompute_base(call: Call, key: int) -> Call:
    """Return the call around a module that is recomputed for a node of `call`.

    A non-reentrant checkpoint recomputes for a node inside the region: a call around `call` has
    called this module. A reentrant one recomputes in the region's own node: the result is `call`.

    Args:
        call: owner of the node that runs.
        key: `id` of the module that is entered.
    """
    around: Call | None = call
    while around is not None:
        if key in around[0].children:
            return around
        around = around[2]
    return call


class Record:
    """The closed intervals of one thread.

    Attributes:
        starts: number of the first node of each interval.
        calls: the call of each interval.

    Example:
        >>> record, out = Record(), outside()
        >>> call = (Path(lambda: None, parent=out[0], name="Linear"), 0, out)
        >>> record.close(3, 5, call); record.close(5, 9, out)
        >>> [record.find(n)[0].name for n in (2, 3, 4, 5)]
        ['', 'Linear', 'Linear', '']
    """

    __slots__ = ("calls", "limit", "starts")

    def __init__(self, *, limit: int = DEFAULT_LIMIT) -> None:
        self.limit = limit
        # Nodes before the first interval belong to the outside.
        self.starts: list[int] = [-1]
        self.calls: list[Call] = [outside()]

    def close(self, start: int, end: int, call: Call) -> None:
        """Record that `call` created the nodes from `start` up to, not including, `end`."""
        if start >= end:
            return
        if len(self.starts) > self.limit:
            self.drop_older_half()
        self.starts.append(start)
        self.calls.append(call)

    def drop_older_half(self) -> None:
        half = 1 + len(self.starts) // 2
        del self.starts[1:half], self.calls[1:half]

    def find(self, number: int) -> Call:
        return self.calls[bisect_right(self.starts, number) - 1]

    def __len__(self) -> int:
        return len(self.starts) - 1


NO_INTERVAL = -1
"""A `ThreadState.number` no counter equals, so that the next transition closes the interval."""


class ThreadState:
    """The running call of a thread. Autograd has one node counter per thread, so does this class.

    Attributes:
        base: represents code outside every module.
        call: innermost running call; `base` when none runs.
        task: id of the backward in which that call was entered, `NO_TASK` in a plain forward.
            If another backward is running now, it runs a node, not module code.
        shown: call to report instead, while a backward hook of that call runs.
        asked: number of the node for which a module was last recomputed.
        number: start of the open interval; `NO_INTERVAL` if it is not the running call's.
        owner: call that the open interval belongs to; None if it is the running call's.
        repeats: recomputations that a library has begun and not ended. For each, the call whose
            code it repeats, None if unknown, and the running call at its beginning.
        inner: whether the thread is a backward thread of torch.
        seen: counter when `explain` was last called.
        leaves: gradient edges of leaf inputs, by `id`, until the calls with those inputs end.
            Nothing else keeps the node of a leaf alive before the leaf is used.
        record: the closed intervals.
        paths: first path of each module, by `id`.
        carrier: puts hooks on autograd nodes; see `hook_gradient`.
    """

    __slots__ = (
        "_start",
        "asked",
        "base",
        "call",
        "carrier",
        "inner",
        "leaves",
        "number",
        "owner",
        "paths",
        "record",
        "repeats",
        "seen",
        "shown",
        "task",
    )

    def __init__(self, *, limit: int, inner: bool = False) -> None:
        self.inner = inner
        self.record = Record(limit=limit)
        self.base = self.call = outside()
        self.task = NO_TASK
        self.asked = NO_INTERVAL
        self.shown: Call | None = None
        self.number = self._start = self.seen = next_number()
        self.owner: Call | None = None
        self.repeats: list[tuple[Call | None, Call]] = []
        self.leaves: dict[int, Edge] = {}
        self.paths: dict[int, Path] = {}
        self.carrier = new_carrier()

    def flush(self, number: int, ran: Call) -> None:
        """Close the open interval as one of `ran`; the next one begins at `number`."""
        owner = self.owner
        if owner is None:
            self.record.close(self.number, number, ran)
        else:
            self.record.close(self._start, number, owner)
            self.owner = None
        self.number = number

    def resume(self) -> None:
        """Attribute the nodes created from now on to the running call, after a recompute."""
        self.flush(next_number(), self.call)

    def find(self, number: int) -> Call:
        owner = self.owner
        if number >= (self.number if owner is None else self._start):
            return self.call if owner is None else owner
        return self.record.find(number)

    def explain(self, call: Call) -> None:
        """Attribute the nodes created since the previous `explain` to `call`.

        Reports call this at every operator. So nodes that a backward creates, for a second
        backward, are attributed to the module whose node ran.
        """
        if call is not (self.owner or self.call):
            since = max(self.seen, self._start if self.owner is not None else self.number)
            self.flush(since, self.call)
            if call is not self.call:
                self.borrow(call, since)
        self.seen = next_number()

    def recomputed(self) -> Call | None:
        """Return the call whose code is recomputed for the running node; None if not known yet.

        It is known once this code has called a module.
        """
        return self.owner if self.owner is not None and self.asked == number_asking() else None

    def walk(self) -> Iterator[Path]:
        return self.base[0].walk()

    def borrow(self, owner: Call, start: int) -> None:
        """Attribute nodes from `start` on to `owner`, until another call runs."""
        self.owner, self._start, self.number = owner, start, NO_INTERVAL


@dataclass(frozen=True)
class ModuleCall:
    """One call of a module.

    Attributes:
        name: canonical name: root label, dot, state_dict prefix.
        called_as: likewise, by the path of this call; differs for shared modules.
        stack: canonical names from the root to this module.
        call_index: number of earlier calls of this path in this thread.
        iteration: number of earlier calls of the root in this thread.
    """

    name: str
    called_as: str
    stack: tuple[str, ...]
    call_index: int
    iteration: int
    _module: Callable[[], nn.Module | None] = field(repr=False, compare=False)

    @property
    def module(self) -> nn.Module | None:
        """The module, or None if it no longer exists."""
        return self._module()

    @property
    def depth(self) -> int:
        """Number of modules in `stack`."""
        return len(self.stack)


def describe(call: Call) -> ModuleCall | None:
    """Return the public description of a call; None for the outside of all modules."""
    path, index, outer = call
    if outer is None:
        return None
    return ModuleCall(
        name=path.name,
        called_as=path.called_as,
        stack=path.stack,
        call_index=index,
        iteration=root_of(call)[1],
        _module=path.module,
    )
