"""Which steps are looked at operator by operator: the first, and fewer and fewer of those alike.

Note [Steps]
Rule 1: a step begins when an outermost module is called after a backward through one, or, without
        gradients, at each call of one. What is done before the first is of the first.
Rule 2: a step that is like no other is looked at: another root, other shapes, another mode. Of
        those alike, the first three are and then each whose number is a power of two.
Rule 3: contexts are opened and closed only where no context of the user's is in between, and never
        in inference mode, which puts back at its end what it found. Where one is, a step goes on
        as the one before it did.
Rule 4: reports may begin and end in any order. What other reports have open is in nobody's way, and
        what is closed is taken out from below what lies on it.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from statistics import median
from typing import Any, Protocol

from torch import is_grad_enabled, nn

from .._attribution import Attribution
from .._edges import edges_of, tensors_in
from .._listeners import Callbacks, Filter
from .._torch_compat import (
    NO_TASK,
    graph_task,
    guarded_keys,
    hook_gradient,
    leave_mode,
    mode_depth,
    top_saved_hooks,
)
from .._tracker import ModTracker

ALWAYS = 3
"""Steps alike that are looked at before it becomes fewer: gradients and optimizer state are there
from the second on."""

MOST_CALLS = 8
"""Outermost calls after which a step has ended although nobody asked for its gradients."""


class Look:
    """The contexts that look at every operator, opened and closed where that is possible.

    Args:
        mode: the dispatch mode.
        hooks: makes a context of hooks for saved tensors; None for none.
        pack: the first of those hooks.

    Attributes:
        on: whether it looks.
        below: the innermost hooks for saved tensors of others, when it was made.
    """

    def __init__(
        self,
        mode: Any,
        hooks: Callable[[], AbstractContextManager[Any]] | None = None,
        pack: Any = None,
    ) -> None:
        self._mode, self._hooks, self._pack = mode, hooks, pack
        self._opened: AbstractContextManager[Any] | None = None
        self.on: bool = False
        self.below: tuple[Any, Any] | None
        self._depth, self.below = _theirs()
        self._keys = guarded_keys()

    def start(self) -> None:
        """Look from now on: the user's contexts that are open now are closed after this one."""
        _here.looks.add(self)
        self._enter()

    def open(self) -> None:
        """Look from now on, unless a context of the user's is in the way."""
        if not self.on and self._is_clear():
            self._enter()

    def _enter(self) -> None:
        if self._hooks is not None:
            self._opened = self._hooks()
            self._opened.__enter__()
        self._mode.__enter__()
        self.on = True

    def _is_clear(self) -> bool:
        return (
            _theirs() == (self._depth, self.below)
            and self._keys is not None
            and guarded_keys() == self._keys
        )

    def close(self, *, anyway: bool = False) -> None:
        """Look no more, unless a context of the user's is in the way; `anyway` also then."""
        if self.on and not anyway and not self._is_clear():
            return
        if self.on:
            leave_mode(self._mode)
            self.on = False
        if self._opened is not None:
            self._opened.__exit__(None, None, None)
            self._opened = None

    def has(self, hooks: tuple[Any, Any]) -> bool:
        """Whether these hooks for saved tensors are its own."""
        return self._hooks is not None and hooks[0] == self._pack


class _Here(threading.local):
    """The looks of this thread."""

    def __init__(self) -> None:
        self.looks: weakref.WeakSet[Look] = weakref.WeakSet()


_here = _Here()


def _theirs() -> tuple[int, tuple[Any, Any] | None]:
    """How many dispatch modes of others are on, and the innermost hooks of others: see Rule 4."""
    depth, hooks = mode_depth(), top_saved_hooks()
    looks = [look for look in _here.looks if look.on]
    if hooks is not None:
        hooks = next((look.below for look in looks if look.has(hooks)), hooks)
    return depth - len(looks), hooks


@contextmanager
def closed_twice(close: Callable[[], object]) -> Iterator[None]:
    """Call `close` at the end, and once more.

    An interrupt in its first instruction keeps it from doing anything. Once too often it changes
    nothing.
    """
    try:
        try:
            yield
        finally:
            close()
    finally:
        close()


class Kind(Protocol):
    """Says which steps are alike."""

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Hashable:
        """Return the same for steps that are alike."""


def by_root(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    """Steps are alike if the same module is called first."""
    return id(module)


def by_shapes(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    """Steps are alike if the same module is called first, with the same shapes, in one mode."""
    shapes: list[Any] = [id(module), module.training, is_grad_enabled()]
    try:
        shapes += [
            (tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad)
            for tensor in tensors_in((args, kwargs))
        ]
        hash(tuple(shapes))
    except Exception:
        return object()  # a tensor without a shape: like no other
    return tuple(shapes)


class _Back:
    """Hears of backwards. It is what graphs hold, and knows nobody.

    Attributes:
        came: whether there was one since this was set to False.
    """

    __slots__ = ("came",)

    def __init__(self) -> None:
        self.came = False

    def __call__(self, grad: Any) -> None:
        self.came = True


class Steps:
    """Opens and closes a `Look` where steps begin. See Note [Steps].

    Attributes:
        begun: steps so far.
        looked_at: those of them that were looked at.
    """

    def __init__(
        self,
        look: Look,
        *,
        kind: Kind,
        every: Callable[[], bool],
        opened: Callable[[], None] = lambda: None,
    ) -> None:
        self.begun: int = 1
        self.looked_at: int = 1
        self._look, self._kind, self._every, self._opened = look, kind, every, opened
        self._alike: Counter[Hashable] = Counter()
        self._thread = threading.get_ident()
        self._calls, self._back = 0, _Back()
        self._took: dict[bool, list[float]] = {False: [], True: []}
        self._since = time.perf_counter()

    def listen(self, tracker: ModTracker) -> AbstractContextManager[Any]:
        """Return a context in which the steps of a tracker are followed."""
        returned = partial(self._returned, tracker._attribution)
        callbacks = Callbacks(pre_forward=self._called, post_forward=returned)
        return tracker._listening(callbacks, Filter(max_depth=1))

    @property
    def looks(self) -> bool:
        """Whether the step that runs, or has just ended, is looked at."""
        return self._look.on

    @property
    def price(self) -> float | None:
        """How many times as long a step that is looked at takes; None if nothing is known."""
        looked, others = self._took[True][1:], self._took[False][1:]  # each begins with a warm-up
        return median(looked) / median(others) if looked and others else None

    def notes(self, what: str) -> tuple[str, ...]:
        """Return what a report has to say of steps that were not looked at, and of the price."""
        if self.looked_at == self.begun:
            return ()
        price = "" if self.price is None else f", which takes {self.price:.2g} times as long"
        return (f"{what} in {self.looked_at} of {self.begun} steps{price}",)

    def _returned(
        self,
        attribution: Attribution,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> None:
        # One hook where the output was made: to hear when a module is entered in backward takes
        # ten times as much.
        state = attribution.state()
        if state is not None and not self._back.came:
            for node, position in edges_of((output,), None):
                hook_gradient(node, position, state.carrier, self._back)

    def _called(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if graph_task() != NO_TASK or threading.get_ident() != self._thread:
            return
        self._calls += 1
        if self._calls == 1 and self.begun == 1:
            self._is_next(module, args, kwargs)
        elif self._back.came or not is_grad_enabled() or self._calls > MOST_CALLS:
            self._begin(self._is_next(module, args, kwargs))

    def _is_next(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        kind = self._kind(module, args, kwargs)
        self._alike[kind] += 1
        number = self._alike[kind]
        return self._every() or number <= ALWAYS or number & (number - 1) == 0

    def _begin(self, wanted: bool) -> None:
        now = time.perf_counter()
        self._took[self._look.on].append(now - self._since)
        self._calls, self._back.came = 1, False
        self.begun += 1
        if wanted and not self._look.on:
            self._look.open()
            if self._look.on:
                self._opened()
        elif not wanted:
            self._look.close()
        self.looked_at += self._look.on
        self._since = time.perf_counter()
